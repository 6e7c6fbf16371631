"""What healing is judged by: loss on unseen text, copying from a distance, the attention sink, cache and speed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_hybrid import HwHForCausalLM


@torch.no_grad()
def heldout_nll(model: PreTrainedModel, windows: Tensor) -> float:
    """Mean negative log-likelihood in nats per token over `windows` `[W, T]`, each read alone."""
    losses = [model(window[None], labels=window[None], use_cache=False).loss.item() for window in windows]
    return sum(losses) / len(losses)


@dataclass(frozen=True)
class Recall:
    """How well the second copy of a random span is predicted: loss in nats per token, and top-1 accuracy."""

    distance: int
    loss: float
    top1: float


@torch.no_grad()
def repeated_span(
    model: PreTrainedModel,
    tokens: Tensor,
    distances: Sequence[int],
    *,
    span: int = 64,
    samples: int = 6,
    seed: int = 0,
) -> list[Recall]:
    """Induction: a span of random tokens, other random tokens, and the span again `distance` tokens after its start.

    Args:
        model: any causal language model.
        tokens: `[N]` of a text, from which the random ones are drawn. Drawn from the whole vocabulary, many would be
            ones that the model hardly met in training, and the measure would be of those.
        distances: tokens from the first copy's start to the second's, at least `span`.
        span: tokens of the span; its first token can't be predicted and is left out.
        samples: rows per distance.
        seed: of the draw.
    """
    results = []
    for distance in distances:
        generator = torch.Generator().manual_seed(seed + distance)
        rows = tokens[torch.randint(len(tokens), (samples, distance + span), generator=generator)]
        rows[:, distance:] = rows[:, :span]
        loss, hits = 0.0, 0.0
        for row in rows:
            logits = model(row[None], use_cache=False, logits_to_keep=span).logits[0, :-1].float()
            target = row[-span + 1 :]
            loss += torch.nn.functional.cross_entropy(logits, target).item()
            hits += (logits.argmax(-1) == target).float().mean().item()
        results.append(Recall(distance, loss / samples, hits / samples))
    return results


@torch.no_grad()
def start_norms(model: PreTrainedModel, start_tokens: Tensor) -> Tensor:
    """Norms `[depth, N]` of the hidden states of `start_tokens` `[N]`, each the first and only token of a row."""
    states = model.model(start_tokens[:, None], output_hidden_states=True, use_cache=False).hidden_states
    return torch.stack([state[:, 0].norm(dim=-1) for state in states])


def sink_share(source: PreTrainedModel, hybrid: PreTrainedModel, start_tokens: Tensor) -> float:
    """Share of `start_tokens` `[N]` whose massive activation the hybrid keeps.

    Softmax heads park unused attention on the first token, whose hidden state is thousands of times larger than others'
    from some depth on. Kept means: at the depth where the source's is largest (its median over the tokens), the
    hybrid's norm lies within a factor of 2 of the source's. Our definition.
    """
    theirs = start_norms(source, start_tokens)
    depth = theirs.median(dim=1).values.argmax()
    ratio = start_norms(hybrid, start_tokens)[depth] / theirs[depth]
    return ((ratio > 0.5) & (ratio < 2)).float().mean().item()


@torch.no_grad()
def decode_speed(model: HwHForCausalLM, context: int, *, steps: int = 20, seed: int = 0) -> float:
    """Tokens per second of decoding one row behind `context` tokens, prefill not counted.

    The cache is filled with random keys and values through its own interface: what they are doesn't change the time.
    """
    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long)
    model(token, cache=cache)
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is not None:
            shape = (*layer.keys.shape[:2], context - 1)
            keys = torch.randn(*shape, layer.keys.shape[3], generator=generator)
            values = torch.randn(*shape, layer.values.shape[3], generator=generator)
            cache.update(keys.to(layer.keys.dtype), values.to(layer.values.dtype), index)
    for _ in range(2):
        model(token, cache=cache)
    start = time.perf_counter()
    for _ in range(steps):
        model(token, cache=cache)
    return steps / (time.perf_counter() - start)
