"""How long building the documents of every offline evaluation task takes.

python benchmarks/eval_build.py [TOKENIZER]

100 samples of each task at 8,192 tokens, seed 42, in one process, without a network: at most 30 s in all on two cores.
The tokenizer is a folder or a name; without one, a byte-level BPE with as many tokens as SmolLM2's is trained first.
Built in turn and once each: documents are built once in a run of lm-eval, so there is nothing to warm up but the
tokenizer, whose loading is not counted. Beside the wall clock's stand processor seconds, which other work on the
machine does not stretch.
"""

import logging
import os
import sys
import tempfile
import time
from pathlib import Path

from lm_eval.tasks import TaskManager
from runner import report

from hf_hybrid.conversion.text_data import load_text
from hf_hybrid.eval import TASKS
from hf_hybrid.eval.settings import Settings

RESULTS = Path(__file__).parent / "results" / "eval_build.json"
BOUND = 30.0
ASKED = {"lengths": [8192], "num_samples": 100, "seed": 42}


def trained_tokenizer(folder):
    """A BPE tokenizer of 49,152 tokens, trained on the haystack's text, in `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([load_text()], trainers.BpeTrainer(vocab_size=49152, initial_alphabet=alphabet))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def offline_tasks(manager, group="hybrid_all"):
    """The tasks of `group` and of its groups."""
    members = manager.task_index[group].cfg["task"]
    return [
        name
        for member in members
        for name in (offline_tasks(manager, member) if member in manager.all_groups else [member])
    ]


def main():
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = sys.argv[1] if len(sys.argv) > 1 else trained_tokenizer(folder)
        metadata = {"tokenizer": str(tokenizer)} | ASKED
        Settings.from_metadata(metadata).count(["The grass is green."])
        manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
        rows = []
        for name in offline_tasks(manager):
            wall, processor = time.perf_counter(), time.process_time()
            documents = manager.load([name])["tasks"][name].eval_docs
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            rows.append({"task": name, "documents": len(documents), "seconds": wall, "processor seconds": processor})
    total = {
        "task": "all",
        "documents": sum(row["documents"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
        "processor seconds": sum(row["processor seconds"] for row in rows),
        "bound": BOUND,
    }
    used = Path(sys.argv[1]).name if len(sys.argv) > 1 else "byte-level BPE of 49152 tokens, trained here"
    facts = {"tokenizer": used, "load average": os.getloadavg()[0]} | ASKED
    report("Building the documents of the offline tasks", [*rows, total], json_path=RESULTS, **facts)


if __name__ == "__main__":
    main()
