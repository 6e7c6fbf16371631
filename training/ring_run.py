"""A ring's training run: batches, optimizer steps, checkpoints by worker, resuming, the ordinary model at the end."""

import datetime
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_hybrid import MobiusConfig, MobiusForCausalLM
from hf_hybrid.conversion.files import atomic_folder, read_json, write_json
from hf_hybrid.training.optimizers import MUONS, build_optimizer
from hf_hybrid.training.ring import Ring, RingWorker, check_ring
from hf_hybrid.validators import validate_at_least, validate_choice, validate_range

RUN = "run.json"
SAFETENSORS_INDEX = "model.safetensors.index.json"


class RingError(RuntimeError):
    """A worker was lost, or a checkpoint does not fit the run; the message says what to do."""


@dataclass(frozen=True)
class RingSettings:
    """How a ring trains.

    Attributes:
        steps: optimizer steps.
        batch_rows: rows of each worker's batch.
        length: tokens of a row.
        accumulation: batches of each worker per optimizer step.
        muon: which Muon the layers' matrices get, see [`build_optimizer`]; `none` = AdamW for everything.
        learning_rate: peak of AdamW.
        muon_learning_rate: peak of Muon.
        weight_decay: of matrices.
        warmup: steps of linear warm-up; the rate then falls to zero along a cosine.
        max_norm: gradients of all workers together are scaled down to this norm.
        save_every: steps between checkpoints; the last step has one anyway.
        timeout: seconds without a word from a neighbour after which the run ends.
        seed: of the order of the rows.

    Raises:
        ValueError: a number is out of its range.
    """

    steps: int
    batch_rows: int = 8
    length: int = 512
    accumulation: int = 1
    muon: str = "auto"
    learning_rate: float = 4e-3
    muon_learning_rate: float = 0.02
    weight_decay: float = 0.1
    warmup: int = 50
    max_norm: float = 1.0
    save_every: int = 500
    timeout: float = 120.0
    seed: int = 0

    def __post_init__(self):
        for field in ("steps", "batch_rows", "accumulation", "save_every"):
            validate_at_least(field, getattr(self, field), 1)
        validate_at_least("length", self.length, 2, " tokens a row")
        validate_at_least("warmup", self.warmup, 0)
        for field in ("learning_rate", "muon_learning_rate", "max_norm", "timeout"):
            validate_range(field, getattr(self, field), 0, above=True)
        validate_range("weight_decay", self.weight_decay, 0)
        validate_choice("muon", self.muon, MUONS)


def batch_of(tokens: Tensor, settings: RingSettings, batch: int) -> Tensor:
    """The `batch`-th batch of a worker, `[batch_rows, length]`, from its own tokens `[N]`.

    Rows do not overlap and come in a new order each time the text has been read; a pure function, so that a resumed run
    goes on where it was.
    """
    rows = len(tokens) // settings.length
    if rows < settings.batch_rows:
        raise RingError(
            f"a worker has {len(tokens)} tokens, a batch of {settings.batch_rows} rows of {settings.length} needs "
            f"{settings.batch_rows * settings.length}: give a longer text or smaller batches"
        )
    per_epoch = rows // settings.batch_rows
    epoch, place = divmod(batch, per_epoch)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(settings.seed * 100_003 + epoch))
    chosen = order[place * settings.batch_rows : (place + 1) * settings.batch_rows]
    return tokens[: rows * settings.length].view(rows, settings.length)[chosen]


def open_ring(settings: RingSettings, backend: str | None = None) -> Ring:
    """Joins the process group of torchrun or accelerate, with the settings' timeout.

    Raises:
        RingError: the process was not started as one of several.
    """
    if "RANK" not in os.environ:
        raise RingError(
            "this process is no worker of a ring: start it as torchrun --nproc-per-node WORKERS --no-python hf-hybrid "
            "ring ..."
        )
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=settings.timeout))
    return Ring.of_process_group()


def load_worker(model: str | Path, ring: Ring, device: torch.device | str = "cpu") -> RingWorker:
    """This worker's part of the ordinary checkpoint in the folder `model`: nothing else is read.

    Raises:
        RingError: the folder holds no Mobius model.
        ValueError: a ring of this size cannot train it.
    """
    config = MobiusConfig.from_pretrained(model)
    if read_json(Path(model) / "config.json").get("model_type") != "mobius":
        raise RingError(f"{model} holds a {config.model_type} model: a ring trains Mobius models")
    check_ring(config, ring.size)
    worker = RingWorker(config, ring.rank)
    own = dict(worker.named_parameters())
    with torch.no_grad():
        for name, whole, columns in worker.whole_names():
            with safe_open(_file_of(Path(model), whole), framework="pt") as file:
                piece = file.get_slice(whole)
                own[name].copy_(piece[:] if columns is None else piece[:, columns])
    return worker.to(device)


def train(
    model: str | Path,
    out: str | Path,
    tokens: Tensor,
    settings: RingSettings,
    ring: Ring,
    *,
    device: torch.device | str = "cpu",
    log: Callable[[int, list[float]], None] | None = None,
) -> RingWorker:
    """Trains this worker's part of `model` to the end; goes on from the last checkpoint in `out` if there is one.

    Args:
        model: folder of an ordinary Mobius checkpoint.
        out: folder of the run; every worker must see the same.
        tokens: `[N]`, this worker's own text.
        settings: how; a run goes on only with the settings that it was begun with.
        ring: this worker's place.
        log: called by worker 0 with each step and the loss of every start group.

    Raises:
        RingError: a neighbour is gone or silent for `settings.timeout` seconds, or the checkpoint is of another run.
    """
    out = Path(out)
    _begin_or_continue(out, model, settings, ring)
    worker = load_worker(model, ring, device)
    optimizer = build_optimizer(
        worker,
        layers=list(worker.layers.values()),
        muon=settings.muon,
        learning_rate=settings.learning_rate,
        muon_learning_rate=settings.muon_learning_rate,
        weight_decay=settings.weight_decay,
    )
    done = last_checkpoint(out)
    if done:
        _load_state(out / f"step-{done:06d}" / f"worker-{ring.rank}.safetensors", worker, optimizer)
    peaks = [group["lr"] for group in optimizer.param_groups]
    step = done
    try:
        for step in range(done, settings.steps):
            share = learning_rate_share(step, settings.steps, settings.warmup)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * share
            optimizer.zero_grad(set_to_none=True)
            losses = torch.zeros(ring.size)
            for batch in range(settings.accumulation):
                rows = batch_of(tokens, settings, step * settings.accumulation + batch).to(device)
                loss = worker.backward_of_streams(ring, rows, 1 / settings.accumulation)
                losses[ring.rank] += loss / settings.accumulation
            worker.add_up_shared(ring)
            worker.clip_gradients(ring, settings.max_norm)
            optimizer.step()
            dist.all_reduce(losses)
            if log is not None and ring.rank == 0:
                log(step + 1, losses.tolist())
            if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
                _save(out, step + 1, worker, optimizer, ring, peaks)
    except RuntimeError as error:
        kept = last_checkpoint(out)
        where = f"the checkpoint of step {kept} in {out}" if kept else "the beginning"
        raise RingError(
            f"worker {ring.rank} lost its ring at step {step + 1}: {str(error).splitlines()[0]}. Start the same "
            f"command again: it goes on from {where}"
        ) from error
    return worker


def learning_rate_share(step: int, steps: int, warmup: int) -> float:
    """The share of the peak rate at `step` of `steps`: a linear warm-up, then a cosine to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def last_checkpoint(out: Path) -> int:
    """The step of the last complete checkpoint in the run's folder; 0 if there is none."""
    return max((int(folder.name[5:]) for folder in out.glob("step-*")), default=0)


def gather(model: str | Path, out: str | Path) -> Path:
    """The workers' last checkpoint in the run's folder `out` as one ordinary model, in `out/model`.

    Args:
        model: the folder that the run started from, for its configuration, tokenizer and code.

    Returns:
        The model's folder, which `from_pretrained` loads.

    Raises:
        RingError: there is no checkpoint.
    """
    out = Path(out)
    step = last_checkpoint(out)
    if not step:
        raise RingError(f"{out} holds no checkpoint of a ring yet")
    config = MobiusConfig.from_pretrained(model)
    state: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {}
    for group in range(config.num_block_groups):
        saved = load_file(out / f"step-{step:06d}" / f"worker-{group}.safetensors")
        for name, whole, columns in RingWorker(config, group).whole_names():
            if columns is None:
                state[whole] = saved[name]
            else:
                parts.setdefault(whole, []).append(saved[name])
    state |= {name: torch.cat(pieces, dim=1) for name, pieces in parts.items()}
    whole = MobiusForCausalLM(config)
    missing, unexpected = whole.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise RingError(f"the checkpoint in {out} does not fit {model}: {sorted({*missing, *unexpected} - tied)[0]}")
    target = out / "model"
    shutil.rmtree(target, ignore_errors=True)
    with atomic_folder(target) as folder:
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
        whole.save_pretrained(folder)
    return target


def _file_of(model: Path, tensor: str) -> Path:
    if (model / SAFETENSORS_INDEX).is_file():
        return model / read_json(model / SAFETENSORS_INDEX)["weight_map"][tensor]
    return model / "model.safetensors"


def _begin_or_continue(out: Path, model: str | Path, settings: RingSettings, ring: Ring) -> None:
    """Worker 0 writes down how the run was begun; all check that they go on in the same way."""
    wanted = {"model": str(Path(model).resolve().name), "workers": ring.size, **asdict(settings)}
    # How often a run saves, and how patient it is, may change while it lasts.
    if ring.rank == 0 and not (out / RUN).exists():
        write_json(out / RUN, wanted)
    dist.barrier()
    begun = read_json(out / RUN)
    free = {"save_every", "timeout"}
    if differing := sorted(key for key in {*wanted, *begun} - free if wanted.get(key) != begun.get(key)):
        key = differing[0]
        raise RingError(
            f"{out} holds a run with {key} {begun.get(key)!r}, this one has {wanted.get(key)!r}: choose another "
            "folder, or the same settings"
        )


def _save(out: Path, step: int, worker: RingWorker, optimizer, ring: Ring, peaks: list[float]) -> None:
    """Every worker's part, in a folder that gets its name when all parts are in it; older ones go then."""
    folder = out / f"step-{step:06d}"
    hidden = out / f".step-{step:06d}"
    if ring.rank == 0:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
    dist.barrier()
    names = {id(weight): name for name, weight in worker.named_parameters()}
    tensors = {name: weight.detach().contiguous() for name, weight in worker.named_parameters()}
    for part in optimizer.optimizers:
        for weight, state in part.state.items():
            for key, value in state.items():
                tensors[f"optimizer.{names[id(weight)]}.{key}"] = torch.as_tensor(value).contiguous()
    save_file(tensors, hidden / f"worker-{ring.rank}.safetensors")
    dist.barrier()
    if ring.rank == 0:
        older = sorted(out.glob("step-*"))
        hidden.rename(folder)
        for old in older:
            shutil.rmtree(old)
    dist.barrier()


def _load_state(path: Path, worker: RingWorker, optimizer) -> None:
    saved = load_file(path)
    owner = {
        id(weight): part for part in optimizer.optimizers for group in part.param_groups for weight in group["params"]
    }
    with torch.no_grad():
        for name, weight in worker.named_parameters():
            weight.copy_(saved[name])
            prefix = f"optimizer.{name}."
            state = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
            if state:
                owner[id(weight)].state[weight] = state
