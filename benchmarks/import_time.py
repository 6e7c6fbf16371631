"""What the first line of a user's program costs: importing hf_hybrid, and `hf-hybrid --help`.

python benchmarks/import_time.py

Bounds: the package at most 0.5 s over transformers' Auto classes, the help at most 0.3 s over the package. Each run is
a fresh process; the three take turns. Counted is processor time, which other work on the machine does not stretch:
importing keeps one core busy, so on a quiet machine it is the wait.
"""

import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from runner import compare, report

RESULTS = Path(__file__).parent / "results" / "import_time.json"
COMMANDS = {
    "transformers": [sys.executable, "-c", "from transformers import AutoConfig, AutoModelForCausalLM"],
    "hf_hybrid": [sys.executable, "-c", "import hf_hybrid"],
    "hf-hybrid --help": [str(Path(sys.executable).with_name("hf-hybrid")), "--help"],
}
# What is measured, against what, and the most seconds that it may cost more.
BOUNDS = {"hf_hybrid": ("transformers", 0.5), "hf-hybrid --help": ("hf_hybrid", 0.3)}


def children_cpu_seconds():
    """Processor time of the child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def main():
    run = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
    contenders = {name: partial(run, command) for name, command in COMMANDS.items()}
    seconds = compare(contenders, clock=children_cpu_seconds).seconds
    rows = []
    for name, (baseline, bound) in BOUNDS.items():
        extra = [own - other for own, other in zip(seconds[name], seconds[baseline], strict=True)]
        rows.append(
            {
                "name": name,
                "seconds": statistics.median(seconds[name]),
                "over": baseline,
                "extra": statistics.median(extra),
                "lowest": min(extra),
                "highest": max(extra),
                "bound": bound,
            }
        )
    report("Import time, processor seconds", rows, json_path=RESULTS)


if __name__ == "__main__":
    main()
