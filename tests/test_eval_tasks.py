"""The evaluation tasks: lengths, depths, seeds, scores. Run through lm-eval's own loading and evaluation, offline."""

import hashlib
import inspect
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import lm_eval
import pytest
import torch
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from tiny_tokenizer import save_tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_hybrid.eval import TASKS
from hf_hybrid.eval.haystack import NOISE, sentences
from hf_hybrid.eval.samples import TooShortError
from hf_hybrid.eval.settings import Settings
from hf_hybrid.eval.tasks import needles, variable_tracking, word_counts

RETRIEVAL = [
    *(f"hybrid_niah_{name}" for name in ("single_1", "single_2", "single_3")),
    *(f"hybrid_niah_{name}" for name in ("multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")),
    "hybrid_passkey",
    "hybrid_phone_book",
]
SYNTHETIC = [
    "hybrid_variable_tracking",
    "hybrid_common_words",
    "hybrid_frequent_words",
    "hybrid_copy_balanced",
    "hybrid_copy_imbalanced",
    "hybrid_associative_recall",
    "hybrid_repeated_span",
]
OFFLINE = [*RETRIEVAL, *SYNTHETIC, "hybrid_last_tokens"]
every_task = pytest.mark.parametrize("name", OFFLINE, ids=lambda name: name.removeprefix("hybrid_"))
LENGTHS = [1500, 2100]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def byte_tokenizer_folder(tmp_path_factory):
    """A token per byte: the same in every version of everything."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = tmp_path_factory.mktemp("bytes")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def manager(tokenizer_folder):
    def make(**metadata):
        metadata = {"tokenizer": str(tokenizer_folder), "lengths": LENGTHS, "num_samples": 13} | metadata
        return TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)

    return make


@pytest.fixture(scope="session")
def loaded(manager):
    """Each task with the default metadata, built once."""
    tasks = {}

    def get(name):
        if name not in tasks:
            tasks[name] = manager().load([name])["tasks"][name]
        return tasks[name]

    return get


def documents(task):
    return list(task.eval_docs)


def prompt(doc):
    return f"{doc['input']} {doc['gen_prefix']}" if doc["gen_prefix"] else doc["input"]


class Answering(LM):
    """Answers each request with a function of its document."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.requests = []

    def generate_until(self, requests, disable_tqdm=False):
        self.requests += requests
        return [self.answer(request.doc) for request in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        self.requests += requests
        return [
            (-2.5 * request.doc["answer_tokens"], self.answer(request.doc) == request.args[1]) for request in requests
        ]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError


def evaluate(task, answer, **options):
    model = Answering(answer)
    task.set_config("num_fewshot", 0)
    results = lm_eval.evaluate(model, {"tasks": {task.config.task: task}, "groups": {}}, **options)
    return results["results"][task.config.task], model.requests, results


# ------------------------------------------------------------------------------------------------------- documents


def test_groups_hold_every_task():
    tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
    members = {name: tasks.task_index[name].cfg["task"] for name in tasks.all_groups}
    assert members["hybrid_retrieval"] == RETRIEVAL
    assert members["hybrid_synthetic"] == SYNTHETIC
    assert members["hybrid_extrapolation"] == ["hybrid_last_tokens"]
    assert members["hybrid_all"] == ["hybrid_retrieval", "hybrid_synthetic", "hybrid_extrapolation"]
    grouped = {*OFFLINE, *members["hybrid_recall"]}
    assert grouped == set(tasks.all_subtasks), "broken YAML is skipped without a word"
    assert all(len(name) < 40 and tasks.task_index[name].cfg["metadata"]["version"] for name in grouped)


def test_commonsense_group_names_tasks_of_lm_eval():
    from lm_eval.tasks._index import TaskIndex

    root = Path(lm_eval.__file__).parent / "tasks"
    folders = ("lambada", "hellaswag", "piqa", "arc", "winogrande", "openbookqa", "super_glue", "siqa")
    index = TaskIndex.build([TASKS, *(root / folder for folder in folders)])
    assert set(index["hybrid_commonsense"].cfg["task"]) <= index.keys()


@every_task
def test_documents_keep_the_contract(loaded, name):
    task = loaded(name)
    docs = documents(task)
    assert [doc["length"] for doc in docs] == LENGTHS * 13, "lengths alternate"
    assert [doc["index"] for doc in docs] == [index for index in range(13) for _ in LENGTHS]
    for doc in docs:
        assert doc["task"] == name
        assert doc["depth"] is None or 0 <= doc["depth"] <= 1
        assert doc["outputs"] and all(isinstance(output, str) and output for output in doc["outputs"])
        assert all(output in doc["answer"] for output in doc["outputs"])
    if name != "hybrid_copy_imbalanced":  # Of the few lines that fit here, two depths can mean the same.
        asked = Counter((doc["length"], prompt(doc)) for doc in docs)
        assert max(asked.values()) == 1, "no question is asked twice"


@every_task
def test_prompts_fill_their_length_and_never_exceed_it(loaded, name):
    """With what lm-eval sends, special tokens included, and room for the answer."""
    task = loaded(name)
    task.build_all_requests(limit=None, rank=0, world_size=1)
    tokenizer = task.count.tokenizer
    for doc, request in zip(task.eval_docs, task.instances, strict=True):
        assert request.args[0] == prompt(doc)
        if task.OUTPUT_TYPE == "loglikelihood":
            assert request.args[1] == doc["answer"]
            tokens = len(tokenizer(prompt(doc) + doc["answer"])["input_ids"])
            assert tokens - len(tokenizer(prompt(doc))["input_ids"]) == doc["answer_tokens"]
        else:
            assert request.args[1]["max_gen_toks"] == doc["max_gen_toks"] >= doc["answer_tokens"]
            tokens = len(tokenizer(prompt(doc))["input_ids"]) + doc["max_gen_toks"]
        # The longest line of unequal ones is as long as the longest answer.
        spare = 2 * doc["max_gen_toks"] if name == "hybrid_copy_imbalanced" else 0.1 * doc["length"]
        assert doc["length"] - spare <= tokens <= doc["length"], doc["index"]


@every_task
def test_shortest_possible_length(manager, loaded, name):
    """The error names it; it works, and one token less does not."""
    with pytest.raises(TooShortError, match=f"{name}: a length of 20 tokens is too short; the shortest") as error:
        manager(lengths=[20]).load([name])
    shortest = error.value.shortest
    if name in ("hybrid_frequent_words", "hybrid_last_tokens"):
        return  # What they ask for depends on the length, and so does the shortest.
    docs = documents(manager(lengths=[shortest]).load([name])["tasks"][name])
    assert {doc["length"] for doc in docs} == {shortest}
    with pytest.raises(TooShortError, match=str(shortest)):
        manager(lengths=[shortest - 1]).load([name])


@every_task
def test_answer_stands_at_its_depth(manager, loaded, name):
    docs = documents(loaded(name))
    if name in ("hybrid_niah_multivalue", "hybrid_niah_multiquery", "hybrid_last_tokens") or docs[0]["depth"] is None:
        assert {doc["depth"] for doc in docs} == {None}
        return
    assert {doc["depth"] for doc in docs} == {tenth / 10 for tenth in range(11)}
    for doc in docs:
        text, answer = doc["input"], doc["outputs"][0]
        if name.startswith("hybrid_copy"):
            text, _, copy = text.partition("\n\nCopy:\n")
            lines, place = text.split("\n")[3:], copy.count("\n")
            assert copy == "".join(f"{line}\n" for line in lines[:place]) and lines[place] == answer
            assert doc["depth"] == pytest.approx(place / (len(lines) - 1), abs=0.51 / (len(lines) - 1))
        elif name == "hybrid_associative_recall":
            lines = text.split("\n")
            pairs = [line for line in lines if "-" in line][: int(len(lines) * 0.25)]
            place = next(place for place, line in enumerate(pairs) if line == f"{lines[-1]} {answer}")
            assert doc["depth"] == pytest.approx(place / (len(pairs) - 1), abs=0.03)
            assert lines.count(f"{lines[-1]} {answer}") == 1, "the asked key does not return before the question"
        else:
            context = text if name == "hybrid_repeated_span" else text.partition("\n")[2].rpartition("\n")[0]
            # A needle or a line of the book is an eighth of the shortest of these texts.
            assert doc["depth"] == pytest.approx(context.find(answer) / len(context), abs=0.13)


@every_task
def test_depths_are_the_ones_asked_for(manager, name):
    docs = documents(manager(depths=[0.25, 1], num_samples=5, lengths=[1500]).load([name])["tasks"][name])
    assert {doc["depth"] for doc in docs} in ({0.25, 1.0}, {None})


@every_task
def test_documents_do_not_depend_on_what_was_built_before(manager, loaded, name):
    docs = documents(loaded(name))
    manager(lengths=[1700], seed=1).load([name])
    random.seed(0)
    again = manager(lengths=LENGTHS[::-1]).load([name])["tasks"][name]
    assert documents(again) == docs
    other = documents(manager(seed=1).load([name])["tasks"][name])
    assert all(mine["outputs"] != its["outputs"] for mine, its in zip(docs, other, strict=True))


def test_documents_are_the_same_in_another_process(loaded, tokenizer_folder):
    """Hash seeds, which order sets and dictionaries of strings, differ between processes."""
    names = ["hybrid_niah_multikey_1", "hybrid_common_words", "hybrid_associative_recall"]
    program = f"""
import json, sys
from lm_eval.tasks import TaskManager
metadata = {{"tokenizer": {str(tokenizer_folder)!r}, "lengths": {LENGTHS}, "num_samples": 13}}
tasks = TaskManager(include_path={str(TASKS)!r}, include_defaults=False, metadata=metadata).load({names[::-1]})["tasks"]
json.dump({{name: list(task.eval_docs) for name, task in tasks.items()}}, sys.stdout)
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert json.loads(found) == {name: documents(loaded(name)) for name in names}


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("hybrid_niah_single_1", "623ef9766161e6cd"),
        ("hybrid_niah_multikey_3", "48ecd09c84aaed61"),
        ("hybrid_variable_tracking", "2a7319fa7de57fe9"),
        ("hybrid_common_words", "a8122f7fcc7e1284"),
        ("hybrid_frequent_words", "e99be4aa33ec3ba5"),
        ("hybrid_passkey", "27a037d6c23daa86"),
        ("hybrid_phone_book", "cccc1ff48f82e84d"),
        ("hybrid_copy_imbalanced", "40ae45213fcb6aed"),
        ("hybrid_associative_recall", "77574170ee954da5"),
    ],
    ids=lambda value: value.removeprefix("hybrid_"),
)
def test_version_1_asks_what_it_always_asked(manager, byte_tokenizer_folder, name, digest):
    """A change of a task's documents is a change of its version. Tasks over Python's text follow Python's version."""
    task = manager(tokenizer=str(byte_tokenizer_folder), lengths=[9000], num_samples=3).load([name])["tasks"][name]
    assert task.VERSION == 1
    content = json.dumps(documents(task), sort_keys=True)
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == digest


# -------------------------------------------------------------------------------------------------- shared prefixes


def shared(texts):
    """Characters with which all of `texts` begin."""
    first, last = min(texts), max(texts)
    return next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


@pytest.mark.parametrize("name", ["single_1", "single_2", "single_3"])
def test_single_needles_share_the_haystack_up_to_the_first(loaded, name):
    docs = [doc for doc in loaded(f"hybrid_niah_{name}").eval_docs if doc["length"] == LENGTHS[1]]
    for start in (0.0, 0.3, 0.8):
        later = [doc for doc in docs if doc["depth"] >= start]
        first = min(doc["input"].index("One of the special magic") for doc in later)
        assert shared([doc["input"] for doc in later]) >= first


@pytest.mark.parametrize("name", ["hybrid_niah_multikey_1", "hybrid_passkey", "hybrid_repeated_span"])
def test_same_needle_at_every_length(loaded, name):
    docs = documents(loaded(name))
    for short, long in zip(docs[::2], docs[1::2], strict=True):
        assert (short["outputs"], short["depth"]) == (long["outputs"], long["depth"])


def test_longer_haystack_continues_the_shorter(loaded):
    short, long = documents(loaded("hybrid_niah_single_2"))[:2]
    assert shared([short["input"], long["input"]]) >= min(
        doc["input"].index("One of the special") for doc in (short, long)
    )


@pytest.mark.parametrize(("name", "questions"), [("multikey_1", 4), ("multikey_2", 11), ("multikey_3", 11)])
def test_questions_over_one_haystack(loaded, name, questions):
    docs = [doc for doc in loaded(f"hybrid_niah_{name}").eval_docs if doc["length"] == LENGTHS[0]][:questions]
    (haystack,) = {doc["input"].rpartition("\n")[0] for doc in docs}
    assert len({doc["outputs"][0] for doc in docs}) == questions
    assert all(doc["outputs"][0] in haystack for doc in docs)


# ------------------------------------------------------------------------------------------------------------ scores


@every_task
def test_oracle_scores_one(loaded, name):
    scores, requests, results = evaluate(loaded(name), lambda doc: doc["answer"])
    expected = 2.5 if name == "hybrid_last_tokens" else 1.0
    assert {key for key in scores if "," in key} == {
        f"{length}{suffix},none" for length in LENGTHS for suffix in ("", "_stderr")
    }
    for length in LENGTHS:
        assert scores[f"{length},none"] == pytest.approx(expected)
        assert scores[f"{length}_stderr,none"] == pytest.approx(0)
    assert len(requests) == 2 * 13
    assert results["versions"][name] == 1
    better = name != "hybrid_last_tokens"
    assert results["higher_is_better"][name] == {str(length): better for length in LENGTHS}


# What a guess among the words that the prompt offers scores; elsewhere a guess is a string of digits or letters.
OFFERED = {
    "hybrid_common_words": (r"\d+\. ([a-z-]+)", "input"),
    "hybrid_frequent_words": (r"\b[a-z]{6}\b", "input"),
}


@every_task
def test_random_answer_scores_the_chance_level(manager, name):
    if name == "hybrid_last_tokens":
        pytest.skip("a loss has no chance level")
    task = manager(num_samples=60, lengths=[1800]).load([name])["tasks"][name]
    generator = random.Random(0)
    if name in OFFERED:
        pattern, _ = OFFERED[name]
        chances = []

        def guess(doc):
            text = doc["input"].rpartition("Below is a numbered")[2].partition("coded words. ")[2] or doc["input"]
            text = text.rpartition("Below is a numbered")[2].partition("\nQuestion")[0]
            offered = sorted(set(re.findall(pattern, text)))
            assert set(doc["outputs"]) <= set(offered)
            chances.append(len(doc["outputs"]) / len(offered))
            return " ".join(generator.sample(offered, k=len(doc["outputs"])))

        scores, _, _ = evaluate(task, guess)
        chance = sum(chances) / len(chances)
        assert 0.01 < chance < 0.7
    else:
        others = documents(manager(num_samples=60, lengths=[1800], seed=7).load([name])["tasks"][name])
        scores, _, _ = evaluate(task, lambda doc: generator.choice(others)["answer"])
        chance = 1 / 402 if name == "hybrid_associative_recall" else 0
    assert scores["1800,none"] == pytest.approx(chance, abs=4 * max(scores["1800_stderr,none"], 0.002))


@pytest.mark.parametrize("name", ["hybrid_niah_multivalue", "hybrid_variable_tracking"])
def test_part_of_the_answer_scores_its_share_with_standard_error(loaded, name):
    def first_of_even(doc):
        return doc["outputs"][0] if doc["index"] % 2 == 0 else ""

    task = loaded(name)
    scores, _, _ = evaluate(task, first_of_even)
    share = 1 / len(task.eval_docs[0]["outputs"])
    values = torch.tensor([share * (index % 2 == 0) for index in range(13)])
    assert scores["1500,none"] == pytest.approx(values.mean().item())
    assert scores["1500_stderr,none"] == pytest.approx((values.std() / 13**0.5).item())


@every_task
def test_no_answer_is_cut_by_a_stop_string(loaded, name):
    task = loaded(name)
    stops = (task.config.generation_kwargs or {"until": []})["until"]
    assert stops or task.OUTPUT_TYPE == "loglikelihood"
    for doc in task.eval_docs:
        assert not any(stop in doc["answer"] for stop in stops)


def test_limit_reaches_every_length_and_others_are_not_reported(loaded):
    task = loaded("hybrid_passkey")
    scores, requests, _ = evaluate(task, lambda doc: doc["answer"], limit=2)
    assert [request.doc["length"] for request in requests] == LENGTHS
    assert scores["1500,none"] == scores["2100,none"] == 1
    scores, _, _ = evaluate(task, lambda doc: doc["answer"], limit=1)
    assert "1500,none" in scores and "2100,none" not in scores


def test_lengths_score_apart(loaded):
    scores, _, _ = evaluate(
        loaded("hybrid_niah_single_1"), lambda doc: doc["answer"] if doc["length"] == 1500 else "I do not know"
    )
    assert (scores["1500,none"], scores["2100,none"]) == (1, 0)


def test_generation_options_of_the_command_line_win(manager):
    task = manager(num_samples=2).load(["hybrid_passkey"])["tasks"]["hybrid_passkey"]
    task.set_config("generation_kwargs", {"max_gen_toks": 3}, update=True)  # What lm-eval does with --gen_kwargs.
    _, requests, _ = evaluate(task, lambda doc: doc["answer"])
    assert {request.args[1]["max_gen_toks"] for request in requests} == {3}


@pytest.mark.parametrize(
    ("metric", "continuation", "score"),
    [
        ("all_found", "it is ABC, or 12", 0.5),
        ("any_found", "it is ABC", 1.0),
        ("any_found", "it is a bc", 0.0),
        ("first_integer", " 12 or 34", 1.0),
        ("first_integer", " 34 or 12", 0.0),
        ("first_integer", " 123", 0.0),
        ("first_integer", " none", 0.0),
        ("exact_match", " 12 ", 1.0),
        ("exact_match", " 12.", 0.0),
    ],
)
def test_metrics(metric, continuation, score):
    from hf_hybrid.eval import metrics

    outputs = {"all_found": ["abc", "34"], "any_found": ["xyz", "abc"]}.get(metric, ["12"])
    assert getattr(metrics, metric)({"length": 64, "outputs": outputs}, [continuation]) == {"64": score}


# ---------------------------------------------------------------------------------------------------------- metadata


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"lengths": [512, -4]}, "lengths: -4 must be a positive integer"),
        ({"lengths": [512.5]}, "lengths: 512.5"),
        ({"lengths": "512"}, "lengths: '512'"),
        ({"depths": [0.5, 1.5]}, "depths: 1.5 must be a number between 0"),
        ({"depths": []}, "depths: an empty list"),
        ({"num_samples": 0}, "num_samples: 0"),
        ({"seed": "a"}, "seed: 'a' must be an integer"),
        ({"train_length": True}, "train_length: True"),
        ({"text": "no/such/file.txt"}, "text: 'no/such/file.txt' is not a file"),
        ({"length": [512]}, "unknown key 'length'; the tasks of hf_hybrid read 'lengths'"),
        ({"depth": 0.5}, "unknown key 'depth'.*'depths'"),
        ({"max_seq_lengths": [512]}, "unknown key 'max_seq_lengths'.*'lengths'"),
        ({"tokenizer": None}, "no tokenizer, and lengths are counted in tokens"),
    ],
    ids=str,
)
def test_bad_metadata_is_one_error(manager, metadata, message):
    with pytest.raises(ValueError, match=message):
        manager(**metadata).load(["hybrid_passkey"])


def test_metadata_beside_arguments_of_the_model(tokenizer_folder):
    settings = Settings.from_metadata(
        {"pretrained": str(tokenizer_folder), "dtype": "float32", "max_length": 9, "train_length": 64, "depths": 1}
    )
    assert settings.lengths == (32, 64, 128, 256, 512, 1024)
    assert settings.depths == (1.0,)


def test_no_argument_of_lm_evals_model_is_taken_for_a_mistyped_key(tokenizer_folder):
    from lm_eval.models.huggingface import HFLM

    names = inspect.signature(HFLM.__init__).parameters.keys() - {"self", "kwargs", "tokenizer"}
    arguments = {name: None for name in names} | {"pretrained": str(tokenizer_folder), "attn_implementation": "eager"}
    assert Settings.from_metadata(arguments).lengths == (1024, 2048, 4096)


def test_haystack_from_a_file(manager, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"The number of this sentence happens to be {number}." for number in range(900)))
    for name in ("hybrid_niah_single_2", "hybrid_last_tokens"):
        docs = documents(manager(text=str(path), num_samples=2).load([name])["tasks"][name])
        assert all("of this sentence happens" in doc["input"] for doc in docs)
    path = tmp_path / "short.txt"
    path.write_text("Too little to read for a model of this kind, alas.")
    with pytest.raises(ValueError, match=r"too short for a length of 2100; give a longer one as metadata text"):
        manager(text=str(path)).load(["hybrid_last_tokens"])


def test_last_tokens_are_the_same_at_every_length(loaded):
    docs = documents(loaded("hybrid_last_tokens"))
    tokenizer = loaded("hybrid_last_tokens").count.tokenizer
    for short, long in zip(docs[::2], docs[1::2], strict=True):
        assert short["answer"] == long["answer"] and long["input"].endswith(short["input"])
        count = short["answer_tokens"]
        ends = [tokenizer(doc["input"] + doc["answer"])["input_ids"][-count:] for doc in (short, long)]
        assert ends[0] == ends[1] and long["answer_tokens"] == count


# ------------------------------------------------------------------------------------------------------------- RULER


@pytest.fixture
def ruler(monkeypatch):
    """lm-eval's own builders, with a stand-in for the word lists and the sentence splitter that they want installed."""
    words = SimpleNamespace(
        _categories={kind: ["amber", "brave"] for kind in ("nouns", "adjectives", "verbs", "noun", "adjective", "verb")}
    )
    monkeypatch.setitem(sys.modules, "wonderwords", SimpleNamespace(RandomWord=lambda: words))
    splitter = SimpleNamespace(
        sent_tokenize=lambda text: re.split(r"(?<=\.) ", text), data=SimpleNamespace(find=lambda name: name)
    )
    monkeypatch.setitem(sys.modules, "nltk", splitter)
    for name in ("prepare_niah", "niah_utils", "cwe_utils", "vt_utils", "fwe_utils"):
        monkeypatch.delitem(sys.modules, f"lm_eval.tasks.ruler.{name}", raising=False)
    from lm_eval.tasks.ruler import common_utils, cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils

    yield SimpleNamespace(
        common=common_utils, cwe=cwe_utils, fwe=fwe_utils, niah=niah_utils, prepare=prepare_niah, vt=vt_utils
    )
    for name in ("prepare_niah", "niah_utils", "cwe_utils"):
        sys.modules.pop(f"lm_eval.tasks.ruler.{name}", None)


@pytest.mark.parametrize(
    ("haystack", "values", "keys", "per_key", "queries"),
    [
        ("repeat", "numbers", 1, 1, 1),
        ("essay", "numbers", 1, 1, 1),
        ("essay", "uuids", 1, 1, 1),
        ("essay", "numbers", 4, 1, 1),
        ("needle", "uuids", 1, 1, 1),
        ("essay", "numbers", 1, 4, 1),
        ("essay", "numbers", 4, 1, 4),
    ],
)
def test_needles_are_asked_for_as_in_ruler(ruler, haystack, values, keys, per_key, queries):
    """The same context, keys and answers give the same prompt, and the same continuation the same score."""
    source = {
        "repeat": NOISE,
        "essay": [word for sentence in sentences(None)[:40] for word in sentence.split()],
        "needle": needles.NEEDLE.replace("{kind}", "{type_needle_v}"),
    }[haystack]
    options = {
        "type_haystack": haystack,
        "type_needle_k": "uuids" if haystack == "needle" else "words",
        "type_needle_v": values,
        "template": ruler.niah.TEMPLATE,
        "num_needle_k": keys,
        "num_needle_v": per_key,
        "num_needle_q": queries,
    }
    random.seed(3)
    theirs, answers, query = ruler.prepare.generate_input_output(200 if haystack == "essay" else 9, source, **options)
    context = theirs.partition("\n")[2].rpartition("\n")[0]
    assert needles.enumeration([query]) == query
    ours = needles.question(context, values, [query], answers, None)
    assert ours.input == theirs
    for answer in answers:
        assert any(
            needles.NEEDLE.format(kind=values, key=key, value=answer) in context
            for key in query.replace("and ", "").split(", ")
        )
    asked = random.Random(3)
    for continuation in (ours.answer, "", ours.answer.upper(), f" {answers[0]}\n\x07", str(asked.random())):
        doc = {"length": 4096, "max_length": 4096, "outputs": answers}
        own = loaded_metric("all_found")(doc, [continuation])
        assert own["4096"] == ruler.common.process_results(doc, [continuation])["4096"]


def loaded_metric(name):
    from hf_hybrid.eval import metrics

    return getattr(metrics, name)


def test_gen_prefix_is_that_of_ruler(ruler, loaded, monkeypatch):
    """Of a whole document of lm-eval's, where the noise needs no download."""
    samples = ruler.prepare.generate_samples(
        NOISE,
        loaded("hybrid_niah_single_1").count.tokenizer,
        max_seq_length=1500,
        type_haystack="repeat",
        type_needle_k="words",
        type_needle_v="numbers",
        template=ruler.niah.TEMPLATE,
        num_samples=2,
    )
    for sample in samples:
        (key,) = re.findall(r"for ([a-z-]+) mentioned", sample["gen_prefix"])
        ours = needles.question("", "numbers", [key], sample["outputs"], None)
        assert ours.gen_prefix == sample["gen_prefix"]


def test_templates_of_the_other_tasks_are_those_of_ruler(ruler):
    theirs = ruler.vt.CONFIG["variable_tracking"]
    assert theirs["template"].replace("{query}", "{value}") == variable_tracking.TEMPLATE
    assert (
        theirs["answer_prefix"].strip().replace("{query}", "{value}").replace("{num_v}", "{count}")
        == variable_tracking.GEN_PREFIX
    )
    assert ruler.cwe.CONFIG["template"] == word_counts.COMMON_TEMPLATE
    assert ruler.cwe.CONFIG["answer_prefix"].strip() == word_counts.COMMON_GEN_PREFIX
    assert ruler.fwe.CONFIG["template"] == word_counts.FREQUENT_TEMPLATE
    assert ruler.fwe.CONFIG["answer_prefix"].strip() == word_counts.FREQUENT_GEN_PREFIX


def test_counts_of_the_word_tasks(manager):
    """Thirty and three times from 4,096 tokens on; frequencies by rank as RULER rounds them."""
    (doc,) = documents(
        manager(lengths=[5000], num_samples=1).load(["hybrid_common_words"])["tasks"]["hybrid_common_words"]
    )
    counts = Counter(re.findall(r"\d+\. (\S+)", doc["input"].rpartition("Below")[2]))
    assert {word for word, count in counts.items() if count == 30} == set(doc["outputs"])
    assert set(counts.values()) == {30, 3} and len(doc["outputs"]) == 10
    (doc,) = documents(
        manager(lengths=[3000], num_samples=1).load(["hybrid_frequent_words"])["tasks"]["hybrid_frequent_words"]
    )
    ranked = Counter(re.findall(r"\.\.\.|\b[a-z]{6}\b", doc["input"].partition("coded words. ")[2].partition("\n")[0]))
    ranks = [count for _, count in ranked.most_common()]
    assert [word for word, _ in ranked.most_common(4)] == ["...", *doc["outputs"]]
    assert ranks[0] / ranks[1] == pytest.approx(4, rel=0.1) and ranks[1] / ranks[3] == pytest.approx(4, rel=0.1)


# ------------------------------------------------------------------------------------------------------- real text


def cloze_file(folder, shape):
    """Documents of growing length whose answer stands in their middle."""
    records = []
    for number in range(1, 9):
        before, after = (
            "Nothing of note was found here. " * 8 * number,
            "More of the same was found there. " * 8 * number,
        )
        fact = f"The device was named Quaxon {number}. "
        if shape == "text":
            records.append({"text": f"{before}{fact}{after}\nDevice name:", "value": f"Quaxon {number}"})
        else:
            answers = [f"quaxon {number}", "another"]
            records.append({"context": before + fact + after, "question": "The device was named", "answers": answers})
    path = folder / f"{shape}.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path, records


@pytest.mark.parametrize(("name", "shape"), [("hybrid_fda", "text"), ("hybrid_triviaqa", "context")])
def test_cloze_recall_from_a_file(manager, tmp_path, name, shape):
    path, records = cloze_file(tmp_path, shape)
    task = manager(data_files={name: str(path)}, lengths=[300, 4000]).load([name])["tasks"][name]
    docs = documents(task)
    assert len(docs) == 16
    for doc, record in zip(docs, [record for record in records for _ in range(2)], strict=True):
        assert len(task.count.tokenizer(doc["input"])["input_ids"]) + 48 <= doc["length"]
        assert doc["outputs"][0].lower() in doc["input"].lower(), "the window holds the answer"
        assert doc["input"].endswith("Device name:" if shape == "text" else ". The device was named")
        if doc["length"] == 4000 and shape == "text":
            assert doc["input"] == record["text"].strip(), "as lm-eval's own task asks"
    cut = next(doc for doc in docs[::-1] if doc["length"] == 300)
    assert len(task.count.tokenizer(cut["input"])["input_ids"]) + 48 > 270
    assert 0.3 < cut["input"].lower().index(cut["outputs"][0].lower()) / len(cut["input"]) < 0.7
    scores, _, _ = evaluate(task, lambda doc: f" the {doc['outputs'][-1].upper()}!" if doc["index"] < 6 else " unknown")
    assert scores["300,none"] == scores["4000,none"] == 0.75


def test_cloze_recall_without_data_is_one_error(manager, monkeypatch, tmp_path):
    import datasets

    def unreachable(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"hybrid_drop: the data set hazyresearch/based_drop is neither cached nor"):
        manager().load(["hybrid_drop"])
    path = tmp_path / "data.jsonl"
    for content, message in [
        ('{"text": "a"}', r"columns \['text'\]; it takes text and value, or context"),
        ("not json", "cannot be read as JSON lines"),
        ("", "holds no record"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            manager(data_files={"hybrid_drop": str(path)}).load(["hybrid_drop"])
