"""Conversion of a sharded checkpoint: peak memory, and time against copying the same files.

    python benchmarks/conversion.py

Bounds: the whole process at most 1.5 times the largest shard + 0.5 GiB; at most 3 times as long as the copy. The
checkpoint is a Llama of 3.2 GB in bfloat16, made on the fly and deleted afterwards; one KV group in four stays full
attention. Twelve GB of free disk are needed.
"""

import argparse
import os
import resource
import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch
from runner import RESULTS, Comparison, compare, peak_memory, report
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_hybrid.conversion.checkpoint_stream import TensorSpec, plan_shards, write_index, write_shard
from hf_hybrid.conversion.convert import convert

CONFIG = LlamaConfig(
    vocab_size=32000,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=14,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    dtype=torch.bfloat16,
)
SHARD_BYTES = 800 * 10**6


def write_source(folder: Path) -> int:
    """Writes the checkpoint and returns the bytes of its largest shard."""
    CONFIG.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    specs = {name: TensorSpec(tuple(tensor.shape), "BF16") for name, tensor in model.state_dict().items()}
    noise = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).bfloat16()
    shards = plan_shards(specs, SHARD_BYTES)

    def filled(name: str) -> torch.Tensor:
        numel = torch.Size(specs[name].shape).numel()
        return noise.repeat(numel // len(noise) + 1)[:numel].view(specs[name].shape)

    for shard in shards:
        write_shard(folder, shard, filled)
    write_index(folder, shards)
    return max(shard.num_bytes for shard in shards)


def quarter_of_groups() -> list[list[int]]:
    """Two of the eight KV groups in each layer, others in every layer."""
    size = CONFIG.num_attention_heads // CONFIG.num_key_value_heads
    return [
        [head for head in range(CONFIG.num_attention_heads) if (head // size + layer) % 4 == 0]
        for layer in range(CONFIG.num_hidden_layers)
    ]


def in_turns(contenders, out: Path, rounds: int) -> Comparison:
    """Like `compare`, with each contender's output deleted, and the disk idle, before the next one starts."""
    seconds = {name: [] for name in contenders}
    for round_number in range(1 + rounds):
        for name, run in contenders.items():
            os.sync()
            taken = compare({name: run}, repeats=1, warmup=0).seconds[name]
            shutil.rmtree(out)
            if round_number:
                seconds[name] += taken
    return Comparison(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to work; default: the system's temporary folder")
    arguments = parser.parse_args()
    # A forked process, in which memory is measured, waits forever for the threads that its parent had.
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        source, out = Path(work) / "source", Path(work) / "out"
        largest = write_source(source)
        run = partial(convert, source, out, heads=quarter_of_groups())
        raised = peak_memory(run)
        whole = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        shutil.rmtree(out)
        comparison = in_turns({"copy": partial(shutil.copytree, source, out), "convert": run}, out, arguments.rounds)
        size = sum(path.stat().st_size for path in source.iterdir())

    report(
        "Conversion against copying the files",
        comparison.rows("copy"),
        json_path=RESULTS / "conversion.json",
        bound={"ratio": 3},
        source_bytes=size,
    )
    report(
        "Peak memory of conversion, GiB",
        [
            {
                "largest shard": largest / 2**30,
                "whole process": whole / 2**30,
                "over its start": raised / 2**30,
                "bound": 1.5 * largest / 2**30 + 0.5,
            }
        ],
        json_path=RESULTS / "conversion_memory.json",
    )


if __name__ == "__main__":
    main()
