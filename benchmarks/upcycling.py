"""Upcycling SmolLM2-135M at 25 % of its KV groups, allocation by allocation: held-out loss after each stage.

    python benchmarks/upcycling.py                              every allocation, about 15 minutes each on two cores
    python benchmarks/upcycling.py --allocations rpd inverted   some of them; finished ones are kept

The stages stand alone: `calibrated` is the closed form on 8k tokens, `aligned` is alignment on 65k tokens with the
ridge regression that ends it. `rank correlation` is Spearman's, over KV groups, between RPD and how much worse linear
attention stands in for a group than NoPE attention does (share of the group's output energy missed after a ridge fit).
"""

import argparse
import json
from pathlib import Path

import torch
from runner import report
from torch import Tensor

from hf_hybrid import HwHForCausalLM
from hf_hybrid.conversion import measure
from hf_hybrid.conversion.allocate import allocate
from hf_hybrid.conversion.analyze import analyze_heads
from hf_hybrid.conversion.calibrate import Moments, calibrate, ridge
from hf_hybrid.conversion.convert import convert
from hf_hybrid.conversion.demo import bundled_checkpoint
from hf_hybrid.conversion.distill import AlignSettings, align
from hf_hybrid.conversion.head_map import HeadMap
from hf_hybrid.conversion.healing import healing_text, load_exact, load_hybrid
from hf_hybrid.conversion.layerwise import LayerRunner, walk_layers
from hf_hybrid.conversion.source_model import load_source
from hf_hybrid.conversion.text_data import heldout_windows

ALLOCATIONS = ("rpd", "random", "inverted", "layerwise")
RESULTS = Path(__file__).parent / "results" / "upcycling.json"


def group_errors(exact: HwHForCausalLM, model: HwHForCausalLM, sequences: Tensor) -> Tensor:
    """Share of each KV group's output energy that `model`'s heads miss after a ridge fit, `[layers, groups]`."""
    config = exact.config
    width = config.num_attention_heads // config.num_key_value_heads * config.head_dim
    teacher, student = LayerRunner(exact), LayerRunner(model)
    errors = []
    for layer, (rows,) in walk_layers(exact, [sequences]):
        moments = [Moments.empty(width, width) for _ in range(config.num_key_value_heads)]
        for inputs in rows.inputs.split(8):
            ours, theirs = student.heads(layer, inputs)[:, 1:], teacher.heads(layer, inputs)[:, 1:]
            for group, moment in enumerate(moments):
                columns = slice(group * width, (group + 1) * width)
                moment.add(ours[..., columns], theirs[..., columns])
        errors.append([moment.error(ridge(moment, torch.zeros(width, width), 1e-4)) for moment in moments])
    return torch.tensor(errors)


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Spearman's rank correlation of two vectors without ties."""
    ranks = torch.stack([values.flatten().argsort().argsort().double() for values in (first, second)])
    return torch.corrcoef(ranks)[0, 1].item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocations", nargs="+", choices=ALLOCATIONS, default=ALLOCATIONS)
    parser.add_argument("--work", type=Path, default=Path("runs/upcycling"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    work, source = arguments.work, bundled_checkpoint()
    work.mkdir(parents=True, exist_ok=True)
    results = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []

    model, tokenizer = load_source(source)
    if not (work / "head_map.safetensors").exists():
        analyze_heads(model, tokenizer).save(work / "head_map.safetensors")
    head_map = HeadMap.load(work / "head_map.safetensors")
    del model
    exact = load_exact(source)
    windows = heldout_windows(tokenizer)
    starts = torch.randint(len(tokenizer), (200,), generator=torch.Generator().manual_seed(99))

    def text(tokens: int, length: int):
        return healing_text(tokenizer, None, num_tokens=tokens, length=length, num_starts=192, seed=arguments.seed)

    def record(allocation: str, stage: str, **values):
        results[:] = [row for row in results if (row["allocation"], row["stage"]) != (allocation, stage)]
        results.append({"allocation": allocation, "stage": stage, **values})
        report("Upcycling SmolLM2-135M", results, json_path=RESULTS, seed=arguments.seed)

    def measured(model: HwHForCausalLM) -> dict:
        recall = measure.repeated_span(model, windows.flatten(), (256,))[0]
        return {
            "nll": measure.heldout_nll(model, windows),
            "sink_kept": measure.sink_share(exact, model, starts),
            "copy_top1_at_256": recall.top1,
        }

    def done(allocation: str, stage: str) -> bool:
        return any((row["allocation"], row["stage"]) == (allocation, stage) for row in results)

    def fresh(heads, name: str) -> HwHForCausalLM:
        folder = work / name
        if not folder.exists():
            convert(source, folder, heads=heads, head_map=head_map)
        return load_hybrid(folder)

    if not done("source", "source"):
        record("source", "source", **measured(exact))
    if not done("rpd", "rank correlation"):
        layers, heads = exact.config.num_hidden_layers, exact.config.num_attention_heads
        sequences = text(8192, 512).sequences
        linear = group_errors(exact, fresh([[]] * layers, "all-linear"), sequences)
        nope = group_errors(exact, fresh([list(range(heads))] * layers, "all-nope"), sequences)
        rpd = head_map.fold_to_groups().rpd
        record("rpd", "rank correlation", spearman=rank_correlation(rpd, linear - nope))
    for name in arguments.allocations:
        allocation = allocate(head_map, full_attention_share=0.25, strategy=name, seed=arguments.seed)
        if not done(name, "calibrated"):
            hybrid, data = fresh(allocation, name), text(8192, 512)
            calibrate(exact, hybrid, data.sequences, data.starts)
            record(name, "calibrated", **measured(hybrid))
        if not done(name, "aligned"):
            hybrid, data = fresh(allocation, name), text(65536, 256)
            settings = AlignSettings(seed=arguments.seed)
            align(exact, hybrid, data.sequences, data.starts, settings, checkpoint=work / f"{name}.layers")
            hybrid.save_pretrained(work / f"{name}-aligned")
            record(name, "aligned", **measured(hybrid))


if __name__ == "__main__":
    main()
