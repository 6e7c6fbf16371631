"""The chunked neural memory of Titans against the token-by-token form: time forward, and forward + backward.

    python benchmarks/neural_memory.py

T = 2,048 tokens, 2 heads of 32, hidden width 64, chunks of 64, float32. The token-by-token form takes its inner
gradients from autograd, as a plain implementation does.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from runner import compare, report

from hf_hybrid.neural_memory import MemoryState, chunk_neural_memory, recurrent_neural_memory

RESULTS = Path(__file__).parent / "results" / "neural_memory.json"
FORMS = {"token by token": recurrent_neural_memory, "chunked": chunk_neural_memory}
SEED, CHUNK = 0, 64


def make_inputs(length: int, heads: int = 2, dim: int = 32, hidden: int = 64) -> list[torch.Tensor]:
    """Queries, unit keys, values, gates as at initialisation, and the memory's weights and momenta."""
    torch.manual_seed(SEED)
    query, key, value = (torch.nn.functional.normalize(torch.randn(1, heads, length, dim), dim=-1) for _ in range(3))
    log_keep = torch.full((1, heads, length), -1e-3)
    log_momentum = torch.full((1, heads, length), 0.9).log()
    rate = torch.full((1, heads, length), 0.05 / CHUNK)
    w1, w2 = torch.randn(1, heads, dim, hidden) * dim**-0.5, torch.randn(1, heads, hidden, dim) * hidden**-0.5
    return [query, key, value, log_keep, log_momentum, rate, w1, w2, torch.zeros_like(w1), torch.zeros_like(w2)]


def forward(form, inputs):
    """Outputs of one form, without gradients."""
    with torch.no_grad():
        return form(*inputs[:6], MemoryState(*inputs[6:]), CHUNK)[0]


def forward_backward(form, inputs):
    """Outer gradients of all inputs of one form."""
    leaves = [part.detach().requires_grad_() for part in inputs]
    return torch.autograd.grad(form(*leaves[:6], MemoryState(*leaves[6:]), CHUNK)[0].sum(), leaves)


def main():
    """Prints the table and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    inputs, rows = make_inputs(arguments.length), []
    for figure, run in (("forward", forward), ("forward + backward", forward_backward)):
        contenders = {name: partial(run, form, inputs) for name, form in FORMS.items()}
        _, chunked = compare(contenders, repeats=arguments.rounds).rows("token by token")
        rows.append({"figure": f"{figure}: time over token by token", **chunked, "bound": 1 / 20})
    report("Neural memory", rows, json_path=RESULTS, seed=SEED, length=arguments.length)


if __name__ == "__main__":
    main()
