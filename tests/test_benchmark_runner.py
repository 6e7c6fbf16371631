"""The benchmarks' runner: turns, ratios, and what is written."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

SPEC = importlib.util.spec_from_file_location(
    "benchmark_runner", Path(__file__).parents[1] / "benchmarks" / "runner.py"
)
runner = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runner)


def test_contenders_take_turns_and_ratios_are_per_round():
    now, turns = 0.0, []

    def run(name, durations):
        nonlocal now
        turns.append(name)
        now += durations.pop(0)

    slow, fast = [100.0, 4.0, 6.0, 20.0], [100.0, 2.0, 2.0, 5.0]
    comparison = runner.compare(
        {"slow": lambda: run("slow", slow), "fast": lambda: run("fast", fast)},
        repeats=3,
        warmup=1,
        clock=lambda: now,
    )
    assert turns == ["slow", "fast"] * 4
    assert comparison.rows("fast") == [
        {"name": "slow", "seconds": 6.0, "ratio": 3.0, "ratio_min": 2.0, "ratio_max": 4.0},
        {"name": "fast", "seconds": 2.0, "ratio": 1.0, "ratio_min": 1.0, "ratio_max": 1.0},
    ]


def test_report_prints_and_writes(tmp_path, capsys):
    path = tmp_path / "results" / "name.json"
    rows = [{"name": "one", "seconds": 0.123456}, {"name": "two", "bound": 3}]
    runner.report("A title", rows, json_path=path, seed=5)
    printed = capsys.readouterr().out
    assert "A title" in printed and "0.1235" in printed
    written = json.loads(path.read_text())
    assert written["rows"] == rows and written["seed"] == 5
    assert written["machine"].keys() >= {"cpu", "cores", "torch", "transformers", "date"}
    assert [file.name for file in path.parent.iterdir()] == ["name.json"]


def test_peak_memory_counts_what_the_run_touches():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from Linux's /proc")
    size = 64 * 2**20
    assert 0.95 * size < runner.peak_memory(lambda: len(b"x" * size)) < 1.5 * size


def test_peak_memory_sees_what_was_freed(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    raised = runner.peak_memory(lambda: len(bytearray(b"1") * 50_000_000))
    assert 45e6 < raised < 80e6


def test_peak_memory_refuses_to_fork_a_pool_of_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(RuntimeError, match=r"3 threads.*set_num_threads\(1\)"):
        runner.peak_memory(int)
