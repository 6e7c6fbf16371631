"""A training step of a tapered model against the uniform one of the same size.

    python benchmarks/taper_speed.py

TLM with attention, 6 layers of width 384, MLPs of 1,024 on average, 4 rows of 256 tokens, AdamW, float32.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from runner import compare, report

from hf_hybrid import TLMConfig, TLMForCausalLM

RESULTS = Path(__file__).parent / "results" / "taper_speed.json"
SIZES = {"vocab_size": 1024, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
SCHEDULES = {"uniform": None, "cosine": {}, "reverse": {"schedule": "reverse"}}
SEED = 0


def train_step(model, optimizer, tokens):
    """Forward, backward and the optimizer's step."""
    optimizer.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()


def main():
    """Prints the table and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    tokens = torch.randint(1024, (4, 256))
    contenders, parameters = {}, {}
    for name, taper in SCHEDULES.items():
        model = TLMForCausalLM(TLMConfig(**SIZES, num_attention_heads=6, mlp_taper=taper))
        parameters[name] = model.num_parameters()
        contenders[name] = partial(train_step, model, torch.optim.AdamW(model.parameters()), tokens)
    rows = compare(contenders, repeats=arguments.rounds).rows("uniform")
    for row in rows:
        row["parameters"] = parameters[row["name"]]
    report("Training step, tapered against uniform", rows, json_path=RESULTS, seed=SEED)


if __name__ == "__main__":
    main()
