"""`hf-hybrid eval`: results per model, task and length, resumed and never mixed, errors before the run, the page."""

import json
import types

import pytest
import torch
from byte_tokenizer import SPECIAL, VOCAB_SIZE, byte_tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from typer.testing import CliRunner

from hf_hybrid import HwHConfig
from hf_hybrid.cli.main import app
from hf_hybrid.eval import runner
from hf_hybrid.eval.results import Cell, ResultsError, Store, by_depth, read_cell

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": VOCAB_SIZE, **SPECIAL}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, hidden_size=36, intermediate_size=44, num_key_value_heads=2, head_dim=6),
    "hwh": HwHConfig(**SIZES, hidden_size=36, intermediate_size=44, num_key_value_heads=2, head_dim=6),
    "gpt2": GPT2Config(**SIZES, n_embd=36, n_positions=512),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def invoke(models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)

    def run(*arguments, out=tmp_path / "out"):
        return CliRunner().invoke(app, ["eval", *map(str, arguments), "--out", str(out), "--device", "cpu"])

    return run


SMALL = ["--tasks", "hybrid_passkey,hybrid_last_tokens", "--lengths", "900,1000", "--num-samples", "3", "--curve", "2"]


def test_two_models_side_by_side_then_resumed(invoke, tmp_path, monkeypatch):
    done = invoke("llama", "short=hwh", *SMALL)
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    cells = {
        (model, task, length): read_cell(out / model / task / f"{length}.json")
        for model in ("llama", "short")
        for task in ("hybrid_passkey", "hybrid_last_tokens")
        for length in (900, 1000)
    }
    for (_, task, length), cell in cells.items():
        assert cell.length == length and [sample["index"] for sample in cell.samples] == [0, 1, 2]
        mean = sum(sample["score"] for sample in cell.samples) / 3
        assert cell.scores == {"score": pytest.approx(mean)} and cell.stderr.keys() == {"score"}
        assert all((sample["depth"] is None) == (task == "hybrid_last_tokens") for sample in cell.samples)
    # A model that knows nothing spreads its guesses over the bytes.
    assert cells["llama", "hybrid_last_tokens", 1000].scores["score"] == pytest.approx(5.56, abs=0.5)
    summary = json.loads((out / "results.json").read_text())
    rows = {(row["model"], row["task"], row["length"]): row for row in summary["scores"]}
    assert rows.keys() == cells.keys() and all(row["documents"] == 3 for row in rows.values())
    assert [curve["model"] for curve in summary["nll_by_position"]] == ["llama", "short"]
    page = (out / "index.html").read_text()
    assert "short" in page and page.count("<figure>") == 3
    assert (out / "nll_by_position.png").stat().st_size > 1000

    # What is finished is not run again; what is missing is.
    (out / "short" / "hybrid_passkey" / "1000.json").unlink()
    evaluated = []
    evaluate = runner.evaluate
    monkeypatch.setattr(
        runner, "evaluate", lambda lm, tasks, **options: (evaluated.append(options), evaluate(lm, tasks, **options))[1]
    )
    again = invoke("llama", "short=hwh", *SMALL)
    assert again.exit_code == 0 and len(evaluated) == 1
    assert list(evaluated[0]["samples"]) == ["hybrid_passkey"]
    assert (out / "index.html").read_text() == page


def test_results_of_another_run_are_not_mixed(invoke, tmp_path):
    assert invoke("llama", *SMALL, "--curve", "0").exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    other = invoke("llama", *SMALL, "--curve", "0", "--seed", "7")
    assert other.exit_code == 1 and "holds hybrid_passkey at 900 tokens of another run (documents" in other.output
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before
    assert invoke("llama", *SMALL, "--curve", "0", "--seed", "7", "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama", "--tasks", "hybrid_nothing"], "no task or group 'hybrid_nothing'"),
        (["llama", "--tasks", ""], "no task is named"),
        (["llama", "--lengths", "700,many"], "--lengths is '700,many': give whole numbers joined by commas"),
        (["llama", "--lengths", "20", "--tasks", "hybrid_passkey"], "20 tokens is too short; the shortest possible"),
        (["llama", "--depths", "0.5,1.5", "--tasks", "hybrid_passkey"], "1.5 must be a number between 0"),
        (["llama", "x=hwh", "x=llama"], "two models are called 'x'"),
        (["llama", "gpt2", "--lengths", "700", "--tasks", "hybrid_passkey"], "more than the 512 rows"),
        (["no/such/folder"], "cannot load no/such/folder with its tokenizer"),
        (["llama", "--text", "absent.txt", "--lengths", "700"], "'absent.txt' is not a file"),
    ],
)
def test_what_cannot_run_ends_before_the_run(invoke, tmp_path, arguments, message):
    failed = invoke(*arguments)
    assert failed.exit_code == 1 and message in " ".join(failed.output.split()), failed.output
    assert not list(tmp_path.rglob("*.json"))


def test_a_length_beyond_memory_ends_before_the_run(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(runner.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=2**18))
    failed = invoke("llama", *SMALL)
    assert failed.exit_code == 1 and "MiB" not in failed.output
    assert "a length of 1,000 tokens with batch size 1 needs at least" in " ".join(failed.output.split())
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("name", ["llama", "hwh"])
def test_cache_bytes_are_those_of_a_long_pass(name, models):
    model = AutoModelForCausalLM.from_pretrained(models / name)
    with torch.no_grad():
        cache = model(torch.zeros(1, 41, dtype=torch.long), use_cache=True).cache
    assert runner.cache_bytes(model, 41) == runner.cache_size(cache)


def cell(**changes) -> Cell:
    samples = [{"index": 0, "depth": 0.5, "score": 1.0, "answer": "x"}, {"index": 1, "depth": 0.5, "score": 0.0}]
    values = {"model": "a/b", "task": "t", "length": 8, "scores": {"score": 0.5}, "stderr": {}, "samples": samples}
    return Cell(**values | {"run": {"seed": 1}, "seconds": 0.5} | changes)


def test_a_store_keeps_cells_and_tells_runs_apart(tmp_path):
    store = Store(tmp_path)
    assert store.load("a/b", "t", 8, {"seed": 1}) is None
    store.save(cell())
    assert store.load("a/b", "t", 8, {"seed": 1}) == cell()
    with pytest.raises(ResultsError, match="seed 1 there, 2 here"):
        store.load("a/b", "t", 8, {"seed": 2})
    assert Store(tmp_path, overwrite=True).load("a/b", "t", 8, {"seed": 2}) is None
    path = store.path("a/b", "t", 8)
    for content in ("{", "[]", json.dumps({"version": 1}), json.dumps({"version": 9, **vars(cell())})):
        path.write_text(content)
        with pytest.raises(ResultsError, match=r"8\.json"):
            store.load("a/b", "t", 8, {"seed": 1})


def test_scores_by_depth():
    deep = cell(length=16, samples=[{"index": 0, "depth": 1.0, "score": 0.25}, {"index": 1, "depth": None, "score": 1}])
    assert by_depth([deep, cell()]) == {8: {0.5: 0.5}, 16: {1.0: 0.25}}
