"""What two streams cost against the ordinary decoder of the same size: training step, decoding, cache, attention.

    python benchmarks/dual_stream_speed.py

8 layers of width 256, 4 heads, w = 64, float32. Training: 4 rows of 512 tokens with AdamW. Decoding: one token behind
4,096. Attention: one layer forward, block by block against one read of all 2T slots under a dense mask.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from runner import compare, report
from transformers import DynamicCache

from hf_hybrid import DualStreamConfig, DualStreamForCausalLM, modeling_dual_stream

RESULTS = Path(__file__).parent / "results" / "dual_stream_speed.json"
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
MODES = ("standard", "dual", "query_only")
SEED, CONTEXT = 0, 4096


def build(mode: str, **fields) -> DualStreamForCausalLM:
    """A random model in one mode."""
    torch.manual_seed(SEED)
    return DualStreamForCausalLM(DualStreamConfig(**{**SIZES, **fields}, stream_mode=mode))


def train_step(model, optimizer, tokens):
    """Forward, backward and the optimizer's step."""
    optimizer.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()


@torch.no_grad()
def prefilled(model, tokens) -> DynamicCache:
    """The cache of `tokens`."""
    cache = DynamicCache(config=model.config)
    model(tokens, cache=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def decode(model, cache, token):
    """One token; the cache grows by it."""
    model(token, cache=cache)


def cache_bytes(cache) -> int:
    """Bytes of all keys and values."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


@torch.no_grad()
def read(model, hidden, block: int):
    """One layer of both streams, `block` pairs at a time."""
    modeling_dual_stream.BLOCK = block
    length = hidden.shape[1] // 2
    pairs = modeling_dual_stream.Pairs(0, length, None, None, hidden.device)
    angles = model.model.rotary_emb(hidden, torch.arange(length)[None])
    model.model.layers[0](hidden, pairs=pairs, position_embeddings=angles)


def main():
    """Prints the table and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    rows = []

    def add(figure: str, contenders: dict, baseline: str, bounds: dict, **extra):
        for row in compare(contenders, repeats=arguments.rounds).rows(baseline):
            more = {name: values.get(row["name"]) for name, values in extra.items()}
            rows.append({"figure": figure, **row, "bound": bounds.get(row["name"]), **more})

    tokens = torch.randint(1024, (4, 512))
    models = {mode: build(mode) for mode in MODES}
    steps = {
        mode: partial(train_step, model, torch.optim.AdamW(model.parameters()), tokens)
        for mode, model in models.items()
    }
    add("training step", steps, "standard", {"dual": 2.2, "query_only": 2.05})

    context = torch.randint(1024, (1, CONTEXT))
    caches = {mode: prefilled(model.eval(), context) for mode, model in models.items()}
    sizes = {mode: cache_bytes(cache) / cache_bytes(caches["standard"]) for mode, cache in caches.items()}
    ones = {mode: partial(decode, models[mode], caches[mode], context[:, :1]) for mode in MODES}
    add(f"decoding behind {CONTEXT:,}", ones, "standard", {"dual": 1.25, "query_only": 1.25}, cache=sizes)

    for length in (1024, 2048, 4096):
        hidden = torch.randn(1, 2 * length, SIZES["hidden_size"])
        block = modeling_dual_stream.BLOCK
        reads = {"dense mask": partial(read, models["dual"], hidden, length)}
        reads |= {
            f"w = {w}": partial(read, build("dual", prediction_window=w).eval(), hidden, block) for w in (16, 64, 256)
        }
        add(f"one layer, T = {length:,}", reads, "dense mask", {})
        modeling_dual_stream.BLOCK = block
    report("Dual stream: cost over the ordinary decoder", rows, json_path=RESULTS, seed=SEED)


if __name__ == "__main__":
    main()
