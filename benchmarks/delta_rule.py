"""The chunked gated delta rule on CPU against transformers' torch fallback: time, error, and time at strong decay.

    python benchmarks/delta_rule.py [--threads N] [--cpu-seconds]

Bounds on hf_hybrid / transformers: forward 1, forward + backward 1/3 (gradients of query, key, value, log_decay and
beta), errors 1; on hf_hybrid at strong / at weak decay: 1.2. Errors are those of float32 against the token-by-token
recurrence in float64, root mean square over root mean square; those of gradients, the worst of the five, against the
chunked form in float64, which the tests hold equal to the recurrence. "correlated keys": beta 1 and no decay; "mixed
decays": 1e-12 at one token in ten. On a machine that others use too, --cpu-seconds compares processor time; it says
nothing about more than one thread.
"""

import argparse
import math
import time
from functools import partial

import torch
import torch.nn.functional as F
from runner import RESULTS, compare, report
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from hf_hybrid.delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule

SEED = 0
FORMS = {
    "transformers": partial(torch_chunk_gated_delta_rule, use_qk_l2norm_in_kernel=False),
    "hf_hybrid": chunk_gated_delta_rule,
}
WEAK, STRONGEST = 0.1, -math.log(1e-12)


def make_inputs(length: int, heads: int, dim: int) -> dict[str, torch.Tensor]:
    """Random inputs of one row of `length` tokens, weakly decaying, and a gradient of the output."""
    torch.manual_seed(SEED)
    return {
        "query": F.normalize(torch.randn(1, length, heads, dim), dim=-1),
        "key": F.normalize(torch.randn(1, length, heads, dim), dim=-1),
        "value": torch.randn(1, length, heads, dim),
        "log_decay": -WEAK * torch.rand(1, length, heads),
        "beta": torch.rand(1, length, heads),
        "grad": torch.randn(1, length, heads, dim),
    }


def error_cases(inputs: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """What the error is measured on: random, correlated keys without decay, strong and weak decays mixed."""
    log_decay, key = inputs["log_decay"], inputs["key"]
    strong = torch.rand_like(log_decay) < 0.1
    correlated = F.normalize(0.3 * key + key.shape[-1] ** -0.5, dim=-1)
    return {
        "random": inputs,
        "correlated keys": inputs
        | {"key": correlated, "beta": torch.ones_like(log_decay), "log_decay": torch.zeros_like(log_decay)},
        "mixed decays": inputs | {"log_decay": torch.where(strong, -STRONGEST, log_decay)},
    }


def decay_cases(inputs: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """What the time is measured on: from weak decay to decays that make numbers denormal."""

    def decayed(decay):
        return inputs | {"log_decay": torch.full_like(inputs["log_decay"], math.log(decay))}

    # One write and a gradient at the end of each 512 tokens: the state, and the gradient, fade to zero in between.
    position = torch.arange(inputs["value"].shape[1]) % 512
    first, last = (position == 0)[:, None, None], (position == 511)[:, None, None]
    fading = {"value": inputs["value"] * first, "grad": inputs["grad"] * last}
    return {
        "weak decay": inputs,
        **{f"decay {decay:g}": decayed(decay) for decay in (1e-12, 1e-6, 1e-3, 0.1, 0.5)},
        "decays 1e-12 to 1": inputs | {"log_decay": -STRONGEST * torch.rand_like(inputs["log_decay"]) ** 4},
        "fading at 0.5": decayed(0.5) | fading,
        "fading at 0.8": decayed(0.8) | fading,
    }


@torch.no_grad()
def forward(form, inputs):
    """The output of one form."""
    query, key, value, log_decay, beta, _ = inputs.values()
    return form(query, key, value, log_decay, beta)[0]


def forward_backward(form, inputs):
    """Gradients of all inputs of one form."""
    *leaves, grad = (x.detach().requires_grad_() for x in inputs.values())
    output = form(*leaves)[0]
    return torch.autograd.grad(output, leaves, grad)


def relative_error(actual, expected):
    """Norm of the error over the norm of `expected`."""
    return ((actual.double() - expected).norm() / expected.norm()).item()


def error_rows(inputs):
    """Errors of each form against float64."""
    rows = []
    for case, changed in error_cases(inputs).items():
        double = {name: x.double() for name, x in changed.items()}
        expected = forward(recurrent_gated_delta_rule, double)
        expected_grads = forward_backward(chunk_gated_delta_rule, double)
        output, grads = {}, {}
        for name, form in FORMS.items():
            output[name] = relative_error(forward(form, changed), expected)
            own_grads = forward_backward(form, changed)
            grads[name] = max(relative_error(*pair) for pair in zip(own_grads, expected_grads, strict=True))
        for kind, errors in (("output", output), ("gradients", grads)):
            rows.append(
                {
                    "figure": f"error, {case}, {kind}",
                    **errors,
                    "ratio": errors["hf_hybrid"] / errors["transformers"],
                    "bound": 1.0,
                }
            )
    return rows


def time_rows(inputs, rounds, clock):
    """Our time over transformers', forward and with gradients."""
    rows = []
    for figure, run, bound in (("forward", forward, 1.0), ("forward + backward", forward_backward, 1 / 3)):
        contenders = {name: partial(run, form, inputs) for name, form in FORMS.items()}
        theirs, own = compare(contenders, repeats=rounds, clock=clock).rows("transformers")
        seconds = {row["name"]: row["seconds"] for row in (theirs, own)}
        spread = {name: own[name] for name in ("ratio", "ratio_min", "ratio_max")}
        rows.append({"figure": f"{figure}, seconds", **seconds, **spread, "bound": bound})
    return rows


def decay_rows(inputs, rounds, clock):
    """Our time at strong decay over that at weak decay."""
    rows = []
    for figure, run in (("forward", forward), ("forward + backward", forward_backward)):
        contenders = {case: partial(run, chunk_gated_delta_rule, x) for case, x in decay_cases(inputs).items()}
        weak, *others = compare(contenders, repeats=rounds, clock=clock).rows("weak decay")
        for row in others:
            name = row.pop("name")
            rows.append({"figure": f"{figure}, {name}", "weak": weak["seconds"], **row, "bound": 1.2})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-seconds", action="store_true", help="compare processor time, not the time on the wall")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_seconds else time.perf_counter
    inputs = make_inputs(arguments.length, arguments.heads, arguments.dim)
    facts = {**vars(arguments), "seed": SEED}
    size = f"T = {arguments.length}, H = {arguments.heads}, D = {arguments.dim}, threads: {arguments.threads}"
    report(
        f"Gated delta rule against transformers' torch fallback; {size}",
        [*time_rows(inputs, arguments.rounds, clock), *error_rows(inputs)],
        json_path=RESULTS / "delta_rule.json",
        **facts,
    )
    report(
        f"hf_hybrid's gated delta rule at strong decay; {size}",
        decay_rows(inputs, arguments.rounds, clock),
        json_path=RESULTS / "delta_rule_decay.json",
        **facts,
    )


if __name__ == "__main__":
    main()
