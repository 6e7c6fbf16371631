"""Runs lm-eval tasks on several models: length by length, resumably, with everything checked before the first token.

The tasks are lm-eval's, ours and others; lm-eval runs and scores them. Added here: shared prefixes, one result file for
each length, and the errors that come before a run and not in its middle.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from transformers import Cache, PreTrainedModel

import hf_hybrid  # noqa: F401  (registers the zoo with the Auto classes)
from hf_hybrid.conversion.analyze import training_length
from hf_hybrid.conversion.source_model import checked_device
from hf_hybrid.conversion.text_data import load_text
from hf_hybrid.eval import TASKS
from hf_hybrid.eval.extrapolation import Bucket, buckets, nll_by_position, require_positions
from hf_hybrid.eval.prefix_sharing import SharedPrefixLM
from hf_hybrid.eval.results import Cell, Store, digest

OWN_PREFIX = "hybrid_"
Say = Callable[[str], None]


class EvaluationError(ValueError):
    """The evaluation cannot be run as asked; the message says what is wrong and what would be right."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run. Lengths in tokens of each model, depths from 0 to 1; see eval/README.md for the tasks."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: tuple[float, ...] | None = None
    num_samples: int = 20
    """Documents of each task and length."""
    seed: int = 42
    text: str | None = None
    data_files: Mapping[str, str] | None = None
    batch_size: int = 1
    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False
    share_prefixes: bool = True
    curve_windows: int = 2
    """Stretches of text for the loss by position, each as long as the longest length; 0 = none."""

    def metadata(self, tokenizer: str) -> dict[str, Any]:
        """What the tasks read: lm-eval's own `--metadata`."""
        options = {"depths": self.depths, "text": self.text, "data_files": self.data_files}
        return {
            "tokenizer": tokenizer,
            "lengths": list(self.lengths),
            "num_samples": self.num_samples,
            "seed": self.seed,
            "trust_remote_code": self.trust_remote_code,
            **{name: value for name, value in options.items() if value is not None},
        }


@dataclass(frozen=True)
class Subject:
    """A model to evaluate: its name in tables, what is loaded, and which GGUF file of it, if it is one."""

    name: str
    location: str
    gguf_file: str | None = None


@dataclass(frozen=True)
class Curve:
    """Loss by position of one model, and the length that it was trained at, if its configuration says so."""

    model: str
    buckets: list[Bucket]
    training_length: int | None = None


def run(
    subjects: Sequence[Subject], plan: Plan, out: str | Path, *, overwrite: bool = False, say: Say = lambda line: None
) -> tuple[list[Cell], list[Curve]]:
    """Evaluates the models one after another; what is finished in `out` is taken over.

    Raises:
        EvaluationError: an unknown task, a model that does not load, two models with one name, or a length that a model
            has no memory for.
        ValueError: a length that a task or a model's table of positions cannot take.
        ResultsError: `out` holds results of another run.
    """
    names = [subject.name for subject in subjects]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise EvaluationError(f"two models are called {min(repeated)!r}: name each once")
    require_known(plan.tasks)
    store = Store(out, overwrite=overwrite)
    if len(subjects) > 1:
        # What the last model cannot do should not be found out after hours with the others.
        for subject in subjects:
            say(f"{subject.name}: checking")
            prepare(subject, plan)
    cells, curves = [], []
    for subject in subjects:
        own_cells, curve = run_model(subject, plan, store, say)
        cells += own_cells
        curves += [] if curve is None else [curve]
    return cells, curves


def require_known(names: Sequence[str]) -> None:
    """Raises `EvaluationError` naming a task or group that lm-eval does not find."""
    if not names:
        raise EvaluationError("no task is named: give tasks or groups, such as hybrid_retrieval")
    manager = task_manager(names, {})
    for name in names:
        if not manager.match_tasks([name]):
            own = ", ".join(known for known in manager.all_tasks if known.startswith(OWN_PREFIX))
            raise EvaluationError(f"there is no task or group {name!r}. Of this project: {own}; all: lm_eval ls tasks")


def task_manager(names: Sequence[str], metadata: dict[str, Any]) -> TaskManager:
    """Finds our tasks, and lm-eval's own only where one of the names needs them: indexing those takes seconds."""
    others = [name for name in names if not name.startswith(OWN_PREFIX) or name == "hybrid_commonsense"]
    return TaskManager(include_path=str(TASKS), include_defaults=bool(others), metadata=metadata)


def prepare(subject: Subject, plan: Plan) -> tuple[SharedPrefixLM, dict[str, Task]]:
    """The loaded model and the tasks with their documents, once they are known to fit each other."""
    longest = max(plan.lengths)
    device = checked_device(plan.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        lm = SharedPrefixLM(
            pretrained=subject.location,
            gguf_file=subject.gguf_file,
            dtype=plan.dtype,
            device=device,
            batch_size=plan.batch_size,
            trust_remote_code=plan.trust_remote_code,
            share=plan.share_prefixes,
            longest=longest,
        )
    except (OSError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise EvaluationError(f"cannot load {subject.location} with its tokenizer: {first_line}") from error
    require_positions(lm.model, longest)
    require_memory(lm.model, longest, plan.batch_size)
    with TemporaryDirectory() as folder:
        tokenizer = subject.location
        if subject.gguf_file is not None:
            # The tasks load the tokenizer by themselves, and a GGUF file takes a minute each time.
            tokenizer = folder
            lm.tokenizer.save_pretrained(folder)
        return lm, task_manager(plan.tasks, plan.metadata(tokenizer)).load(list(plan.tasks))["tasks"]


def run_model(subject: Subject, plan: Plan, store: Store, say: Say) -> tuple[list[Cell], Curve | None]:
    """All cells of one model, and its curve where the plan wants one."""
    lm, tasks = prepare(subject, plan)
    identity = {"model": model_digest(lm.model), "dtype": str(lm.model.dtype).removeprefix("torch.")}

    cells = []
    for name, task in tasks.items():
        for length, numbers in by_length(task).items():
            documents = [task.eval_docs[number] for number in numbers]
            cell_run = {**identity, "version": task.VERSION, "documents": digest(documents)}
            cell = store.load(subject.name, name, length, cell_run)
            if cell is None:
                cell = run_cell(lm, subject.name, name, task, length, numbers, cell_run)
                store.save(cell)
                say(f"{subject.name}: {cell.label}: {score_text(cell)}, {cell.seconds:.0f} s")
            else:
                say(f"{subject.name}: {cell.label}: {score_text(cell)}, from {store.folder}")
            cells.append(cell)
    curve = run_curve(lm, subject.name, plan, store, identity, say) if plan.curve_windows else None
    return cells, curve


def by_length(task: Task) -> dict[int | None, list[int]]:
    """Numbers of the task's documents by their length, None for documents without one."""
    numbers: dict[int | None, list[int]] = {}
    for number, document in enumerate(task.eval_docs):
        length = document.get("length") if task.config.task.startswith(OWN_PREFIX) else None
        numbers.setdefault(length, []).append(number)
    return dict(sorted(numbers.items(), key=lambda item: item[0] or 0))


def run_cell(
    lm: SharedPrefixLM,
    model: str,
    name: str,
    task: Task,
    length: int | None,
    numbers: list[int],
    cell_run: dict[str, Any],
) -> Cell:
    """Runs the documents `numbers` of a task through lm-eval."""
    began = time.perf_counter()
    task_dict = {"tasks": {name: task}, "groups": {}, "group_map": {}}
    results = evaluate(lm, task_dict, samples={name: numbers}, bootstrap_iters=1000)
    scores, stderr = {}, {}
    for key, value in results["results"][name].items():
        metric, _, kind = key.partition(",")
        if not kind or not isinstance(value, int | float):
            continue
        target = stderr if metric.endswith("_stderr") else scores
        metric = metric.removesuffix("_stderr")
        target["score" if metric == str(length) else metric] = float(value)
    samples = [
        {
            "index": sample["doc"].get("index", sample["doc_id"]) if length is not None else sample["doc_id"],
            "depth": sample["doc"].get("depth") if length is not None else None,
            "score": sample.get(str(length)),
            "answer": next((answer for answer in sample["filtered_resps"] if isinstance(answer, str)), None),
        }
        for sample in results["samples"][name]
    ]
    return Cell(model, name, length, scores, stderr, samples, cell_run, time.perf_counter() - began)


def score_text(cell: Cell) -> str:
    """The scores with their standard errors, in words."""
    parts = []
    for metric, score in cell.scores.items():
        error = f" ± {cell.stderr[metric]:.3f}" if metric in cell.stderr else ""
        parts.append(f"{metric} {score:.3f}{error}")
    return ", ".join(parts)


def run_curve(
    lm: SharedPrefixLM, model: str, plan: Plan, store: Store, identity: dict[str, Any], say: Say
) -> Curve | None:
    """Loss by position over the last stretches of the text; kept like a cell, under the task name `nll_by_position`."""
    length = max(plan.lengths)
    tokens = torch.tensor(lm.tok_encode(load_text(plan.text), add_special_tokens=False))
    if plan.curve_windows * length > len(tokens):
        raise EvaluationError(
            f"the text has {len(tokens):,} tokens, the loss by position needs {plan.curve_windows} stretches of "
            f"{length:,}: give a longer text, or at most {len(tokens) // length} stretches"
        )
    windows = tokens[-plan.curve_windows * length :].view(plan.curve_windows, length)
    curve_run = {**identity, "documents": digest(windows.tolist())}
    cell = store.load(model, "nll_by_position", length, curve_run)
    if cell is None:
        began = time.perf_counter()
        found = buckets(nll_by_position(lm.model, windows))
        overall = sum(bucket.nll * (bucket.end - bucket.start) for bucket in found) / (length - 1)
        samples = [vars(bucket) for bucket in found]
        seconds = time.perf_counter() - began
        cell = Cell(model, "nll_by_position", length, {"nll": overall}, {}, samples, curve_run, seconds)
        store.save(cell)
        say(f"{model}: {cell.label}: {score_text(cell)}, {cell.seconds:.0f} s")
    config = lm.config.get_text_config(decoder=True)
    return Curve(model, [Bucket(**bucket) for bucket in cell.samples], training_length(config))


# Before the run


def model_digest(model: PreTrainedModel) -> str:
    """Tells one model from another: its configuration and a few numbers out of every tensor."""
    config = {
        name: value for name, value in model.config.to_dict().items() if not name.startswith(("_", "transformers"))
    }
    numbers = {
        name: parameter.detach().flatten()[:: max(1, parameter.numel() // 16)][:16].float().tolist()
        for name, parameter in model.named_parameters()
    }
    return digest([config, numbers])


@torch.no_grad()
def cache_bytes(model: PreTrainedModel, length: int) -> int:
    """Bytes of the cache of one sequence of `length` tokens, from those of two short ones."""
    short, longer = (
        cache_size(model(torch.zeros(1, tokens, dtype=torch.long, device=model.device), use_cache=True).cache)
        for tokens in (4, 8)
    )
    return short + (longer - short) * (length - 4) // 4


def cache_size(cache: Cache | None) -> int:
    """Bytes of all tensors that a cache holds."""
    if cache is None:
        return 0
    tensors: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                collect(item)
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    for layer in cache.layers:
        collect(vars(layer))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def require_memory(model: PreTrainedModel, length: int, batch_size: int) -> None:
    """Raises `EvaluationError` where the cache of the longest length cannot fit in the memory that is free.

    Counted are the cache of a batch, a prefix's cache and its copy, and whole matrices of scores where the model's
    attention makes them. An estimate from below: what passes may still fail.
    """
    needed = cache_bytes(model, length) * (batch_size + 2)
    if model.config._attn_implementation == "eager":
        heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", 1)
        needed += batch_size * heads * length**2 * 4
    on_cuda = model.device.type == "cuda"
    free = torch.cuda.mem_get_info(model.device)[0] if on_cuda else psutil.virtual_memory().available
    if needed > free:
        raise EvaluationError(
            f"a length of {length:,} tokens with batch size {batch_size} needs at least {needed / 2**30:.1f} GiB for "
            f"its cache, and {free / 2**30:.1f} GiB are free: give shorter lengths or a smaller batch size"
        )
