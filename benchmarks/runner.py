"""The runner of every benchmark: fair turns, ratios with their spread, a table on screen and JSON beside it.

Timings of a shared machine drift. So what is compared takes turns in one process (A B A B ... after a warm-up), and
what is reported is the median over rounds of the ratio inside a round, with its range.
"""

import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Comparison:
    """Seconds of each contender, round by round."""

    seconds: dict[str, list[float]]

    def rows(self, baseline: str) -> list[dict[str, Any]]:
        """A row per contender: median seconds, and the ratio to `baseline` as median, lowest and highest round."""
        result = []
        for name, times in self.seconds.items():
            ratios = [own / other for own, other in zip(times, self.seconds[baseline], strict=True)]
            result.append(
                {
                    "name": name,
                    "seconds": statistics.median(times),
                    "ratio": statistics.median(ratios),
                    "ratio_min": min(ratios),
                    "ratio_max": max(ratios),
                }
            )
        return result


def compare(
    contenders: dict[str, Callable[[], Any]],
    *,
    repeats: int = 7,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Times the contenders in turns, `repeats` rounds after `warmup` untimed ones."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(warmup + repeats):
        for name, run in contenders.items():
            start = clock()
            run()
            if round_number >= warmup:
                seconds[name].append(clock() - start)
    return Comparison(seconds)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch
    import transformers

    model = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": date.today().isoformat(),
    }


def report(title: str, rows: Sequence[dict[str, Any]], *, json_path: Path | None = None, **facts: Any) -> None:
    """Prints `rows` as a table and writes them, with `facts` (such as the seed) and the machine, to `json_path`."""
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title)
    for name in columns:
        table.add_column(name)
    for row in rows:
        table.add_row(*(_shown(row.get(name, "")) for name in columns))
    Console().print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        content = {"title": title, **facts, "machine": machine(), "rows": list(rows)}
        temporary = json_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(temporary, json_path)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def peak_memory(run: Callable[[], Any]) -> int:
    """Bytes by which `run` raises the peak resident memory of a forked process over what it starts with.

    Raises `RuntimeError` while torch may use several threads: their pool does not survive a fork, the child would wait
    for it forever.
    """
    import torch

    if (threads := torch.get_num_threads()) > 1:
        raise RuntimeError(f"torch uses {threads} threads: call torch.set_num_threads(1) before peak_memory")
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_peak, args=(run, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError("the measured process ended without a result; its error is above") from None
    finally:
        process.join()


def _measure_peak(run: Callable[[], Any], sender) -> None:
    # Writing 5 resets the peak that Linux keeps for the process.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    sender.send(_status("VmHWM") - before)


def _status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
