"""SmolLM2-135M and the head-wise hybrid that `make demo` makes of it: retrieval and loss at several lengths.

    python benchmarks/evaluation.py

Wants `make demo` to have run. Documents with seed 42; leaves pictures and a page in runs/evaluation, and goes on there
if it is stopped. About a quarter of an hour on two cores.
"""

import argparse
from pathlib import Path

from runner import RESULTS, report

from hf_hybrid.conversion.demo import bundled_checkpoint
from hf_hybrid.conversion.source_model import locate
from hf_hybrid.eval.page import write_results_page
from hf_hybrid.eval.results import summary
from hf_hybrid.eval.runner import Plan, Subject, run

PLAN = Plan(
    tasks=(
        "hybrid_niah_single_1",
        "hybrid_niah_single_2",
        "hybrid_niah_multikey_2",
        "hybrid_passkey",
        "hybrid_associative_recall",
        "hybrid_repeated_span",
        "hybrid_last_tokens",
    ),
    lengths=(512, 1024, 2048),
    num_samples=8,
    dtype="float32",
    device="cpu",
    curve_windows=4,
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hybrid", type=Path, default=Path("runs/demo/aligned-short"))
    parser.add_argument("--out", type=Path, default=Path("runs/evaluation"))
    arguments = parser.parse_args()
    if not arguments.hybrid.is_dir():
        parser.error(f"{arguments.hybrid} is not there: run `make demo` first, or name a model with --hybrid")

    subjects = [Subject("SmolLM2-135M", *locate(bundled_checkpoint(), None)), Subject("HwH", str(arguments.hybrid))]
    cells, curves = run(subjects, PLAN, arguments.out, say=print)
    facts = {"Documents": f"{PLAN.num_samples} of each task and length, seed {PLAN.seed}"}
    write_results_page(arguments.out, cells, curves, facts=facts)
    report(
        "SmolLM2-135M and its head-wise hybrid",
        summary(cells),
        json_path=RESULTS / "evaluation.json",
        seed=PLAN.seed,
        nll_by_position={curve.model: [vars(bucket) for bucket in curve.buckets] for curve in curves},
    )


if __name__ == "__main__":
    main()
