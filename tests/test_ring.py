"""Ring training against the model in one process: loss, gradients, ten steps; checkpoints and lost workers."""

import multiprocessing
import os
import socket
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from families import assert_same

from hf_hybrid import MobiusConfig, MobiusForCausalLM
from hf_hybrid.training.optimizers import build_optimizer
from hf_hybrid.training.ring import Ring, RingWorker, check_ring
from hf_hybrid.training.ring_run import (
    RingError,
    RingSettings,
    batch_of,
    gather,
    last_checkpoint,
    learning_rate_share,
    load_worker,
    open_ring,
    train,
)

ROWS, LENGTH = 2, 9
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "mlp_gated": False, "hidden_act": "relu2", "norm_weights": False},
    "between-passes": {"input_injection": True, "pass_norm": True, "tie_word_embeddings": True},
    "streams": {"stream_embeddings": True},
    "tied-streams": {"stream_embeddings": True, "tie_word_embeddings": True, "input_injection": True},
    "hybrid": {"full_attention_heads": "alternate", "mlp_taper": {"multiple_of": 2}},
}


def small_config(groups, passes, variant="plain"):
    fields = dict(VARIANTS[variant])
    layers = 2 * groups
    if fields.get("full_attention_heads") == "alternate":
        fields["full_attention_heads"] = [[0], [0, 1, 2]] * groups
    return MobiusConfig(
        **{
            "vocab_size": 53,
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_hidden_layers": layers,
            "num_attention_heads": 3,
            "num_block_groups": groups,
            "passes": passes,
            "max_position_embeddings": 64,
            **fields,
        }
    )


def save_whole(folder, config, seed=0):
    torch.manual_seed(seed)
    model = MobiusForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder


def tokens_of(rank, count=400):
    return torch.randint(3, 53, (count,), generator=torch.Generator().manual_seed(100 + rank))


def settings_of(**fields):
    return RingSettings(
        **{
            "steps": 10,
            "batch_rows": ROWS,
            "length": LENGTH,
            "warmup": 2,
            "save_every": 4,
            "timeout": 20.0,
            "learning_rate": 1e-3,
            **fields,
        }
    )


def start(rank, port, size, function, arguments):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    function(rank, *arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ring(size, function, *arguments, join=True):
    """Runs `function(rank, *arguments)` in `size` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Processes that start from one that has imported everything already.
    multiprocessing.set_forkserver_preload(["hf_hybrid.training.ring_run", "hf_hybrid.modeling_mobius", "families"])
    arguments = (port, size, function, arguments)
    return mp.start_processes(start, arguments, nprocs=size, join=join, start_method="forkserver")


def gradients_of_worker(rank, folder, model):
    settings = settings_of()
    ring = open_ring(settings, "gloo")
    worker = load_worker(model, ring)
    loss = worker.backward_of_streams(ring, batch_of(tokens_of(rank), settings, 0))
    worker.add_up_shared(ring)
    norm = worker.clip_gradients(ring, 1e9)
    names = {name: (whole, columns) for name, whole, columns in worker.whole_names()}
    gradients = [(*names[name], weight.grad) for name, weight in worker.named_parameters()]
    numbers = {"hidden_bytes": ring.hidden_bytes, "norm": norm, "loss": loss}
    torch.save({"gradients": gradients, **numbers}, Path(folder) / f"{rank}.pt")


@pytest.mark.parametrize(
    ("groups", "passes", "variant"),
    [
        *((groups, passes, "plain") for groups in (2, 3, 4) for passes in (1, 3)),
        *((2, 2, variant) for variant in VARIANTS if variant != "plain"),
    ],
)
def test_loss_and_gradients_equal_the_whole_model(tmp_path, groups, passes, variant):
    config = small_config(groups, passes, variant)
    model = save_whole(tmp_path / "model", config)
    run_ring(groups, gradients_of_worker, tmp_path, model)
    whole = MobiusForCausalLM.from_pretrained(model)
    rows = [batch_of(tokens_of(rank), settings_of(), 0) for rank in range(groups)]
    starts = torch.arange(groups).repeat_interleave(ROWS)
    losses = [whole(input_ids=row, labels=row, start_groups=rank).loss.item() for rank, row in enumerate(rows)]
    whole(input_ids=torch.cat(rows), labels=torch.cat(rows), start_groups=starts).loss.backward()
    expected = {name: weight.grad for name, weight in whole.named_parameters()}
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
    seen = set()
    for rank in range(groups):
        result = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert result["loss"] == pytest.approx(losses[rank], abs=1e-5)
        assert result["norm"] == pytest.approx(norm, rel=1e-5)
        # One hidden state and its gradient for each token and step, and nothing else.
        assert result["hidden_bytes"] == 2 * groups * passes * ROWS * LENGTH * config.hidden_size * 4
        for name, columns, gradient in result["gradients"]:
            seen.add(name)
            assert_same(gradient, expected[name] if columns is None else expected[name][:, columns])
    assert seen == set(expected)


def train_worker(rank, model, out, fields, die_at=None):
    settings = settings_of(**fields)
    ring = open_ring(settings, "gloo")

    def log(step, losses):
        if die_at is not None and step == die_at:
            os._exit(3)

    try:
        train(model, out, tokens_of(rank), settings, ring, log=log)
    except RingError as error:
        (Path(out) / f"error-{rank}.txt").write_text(str(error))
        os._exit(4)


@pytest.mark.parametrize("muon", ["auto", "none"])
def test_ten_optimizer_steps_equal_the_whole_model(tmp_path, muon):
    fields = {"muon": muon, "muon_learning_rate": 0.01, "accumulation": 2, "max_norm": 0.5}
    settings, config = settings_of(**fields), small_config(2, 2, "between-passes")
    model = save_whole(tmp_path / "model", config)
    run_ring(2, train_worker, model, tmp_path / "run", fields)
    gathered = MobiusForCausalLM.from_pretrained(gather(model, tmp_path / "run"))

    whole = MobiusForCausalLM.from_pretrained(model)
    rates = {"learning_rate": settings.learning_rate, "muon_learning_rate": 0.01}
    built = build_optimizer(whole, muon=muon, **rates, weight_decay=settings.weight_decay)
    peaks = [group["lr"] for group in built.param_groups]
    starts = torch.arange(2).repeat_interleave(ROWS)
    for step in range(10):
        for group, peak in zip(built.param_groups, peaks, strict=True):
            group["lr"] = peak * learning_rate_share(step, 10, 2)
        built.zero_grad()
        for part in range(2):
            rows = torch.cat([batch_of(tokens_of(rank), settings, 2 * step + part) for rank in range(2)])
            (whole(input_ids=rows, labels=rows, start_groups=starts).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        built.step()
    for (name, actual), (_, expected) in zip(gathered.named_parameters(), whole.named_parameters(), strict=True):
        error = (actual - expected).abs().max().item()
        assert error <= 1e-5 * max(1.0, expected.abs().max().item()), (name, error)


def test_a_lost_worker_ends_the_run_and_the_run_goes_on(tmp_path):
    model = save_whole(tmp_path / "model", small_config(2, 1))
    run_ring(2, train_worker, model, tmp_path / "straight", {})
    begun = time.monotonic()
    processes = run_ring(2, train_worker, model, tmp_path / "broken", {}, 7, join=False)
    for process in processes.processes:
        process.join(60)
    assert [process.exitcode for process in processes.processes] == [3, 4]
    assert time.monotonic() - begun < 50
    message = (tmp_path / "broken" / "error-1.txt").read_text()
    assert "worker 1 lost its ring at step" in message
    assert f"the checkpoint of step 4 in {tmp_path / 'broken'}" in message
    assert last_checkpoint(tmp_path / "broken") == 4
    run_ring(2, train_worker, model, tmp_path / "broken", {})
    for rank in range(2):
        name = f"step-000010/worker-{rank}.safetensors"
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_a_run_goes_on_only_with_its_own_settings(tmp_path):
    model = save_whole(tmp_path / "model", small_config(2, 1))
    run_ring(2, train_worker, model, tmp_path / "run", {"steps": 2})
    processes = run_ring(2, train_worker, model, tmp_path / "run", {"steps": 2, "length": 8}, join=False)
    for process in processes.processes:
        process.join(60)
    assert "length 9, this one has 8" in (tmp_path / "run" / "error-0.txt").read_text()


def test_a_worker_holds_its_share_of_the_blocks():
    config = small_config(4, 2)
    whole = sum(weight.numel() for name, weight in MobiusForCausalLM(config).named_parameters() if "layers." in name)
    for group in range(4):
        own = sum(weight.numel() for weight in RingWorker(config, group).layers.parameters())
        assert own * 4 == whole


@pytest.mark.parametrize(
    ("fields", "workers", "named"),
    [
        ({}, 3, "num_block_groups is 2.*3 workers"),
        ({"depth_order": "looped"}, 2, "depth_order is 'looped'"),
        ({"attention_dropout": 0.1}, 2, "attention_dropout is 0.1"),
    ],
)
def test_what_a_ring_cannot_train_is_refused(fields, workers, named):
    config = small_config(2, 1)
    for field, value in fields.items():
        setattr(config, field, value)
    with pytest.raises(ValueError, match=named):
        check_ring(config, workers)


def test_bad_settings_and_starts_are_refused(monkeypatch):
    for field, value in {"steps": 0, "length": 1, "learning_rate": 0, "timeout": float("nan")}.items():
        with pytest.raises(ValueError, match=field):
            settings_of(**{field: value})
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RingError, match="torchrun"):
        open_ring(settings_of())
    with pytest.raises(RingError, match="a worker has 10 tokens"):
        batch_of(torch.arange(10), settings_of(), 0)


def test_every_row_is_read_once_an_epoch():
    settings, tokens = settings_of(), torch.arange(4 * ROWS * LENGTH + 5)
    rows = torch.cat([batch_of(tokens, settings, batch) for batch in range(4)])
    assert rows.flatten().sort().values.equal(torch.arange(4 * ROWS * LENGTH))
    again = torch.cat([batch_of(tokens, settings, batch) for batch in range(4, 8)])
    assert not again.equal(rows)


def test_a_ring_of_one_sends_nothing():
    ring = Ring(0, 1)
    config = small_config(1, 2)
    worker = RingWorker(config, 0)
    worker.backward_of_streams(ring, batch_of(tokens_of(0), settings_of(), 0))
    assert ring.hidden_bytes == ring.shared_bytes == 0


def test_learning_rate_rises_then_falls_to_zero():
    shares = [learning_rate_share(step, 20, 4) for step in range(21)]
    assert shares[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert shares[20] == pytest.approx(0)
    assert all(later <= earlier for earlier, later in pairwise(shares[4:]))
