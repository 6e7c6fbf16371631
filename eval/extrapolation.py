"""Loss by position: where along a text a language model stops understanding it.

One pass over long stretches of text, in pieces behind a cache, so that no logits of a whole stretch are held. A model
that extrapolates keeps its loss beyond the length that it was trained at; one that does not shows from where on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

Progress = Callable[[int, int], None]  # tokens read, tokens in all

# Tokens read at once: their logits are held together.
CHUNK = 512


@torch.no_grad()
def nll_by_position(
    model: PreTrainedModel, input_ids: Tensor, *, chunk: int = CHUNK, progress: Progress | None = None
) -> Tensor:
    """`[W, T - 1]` negative log-likelihoods in nats; column t is that of token t + 1 given all before it.

    Args:
        model: any causal language model whose cache can be continued by several tokens.
        input_ids: `[W, T]` stretches of text; each is read alone.

    Raises:
        ValueError: the stretches are longer than the model's table of positions.
    """
    windows, length = input_ids.shape
    require_positions(model, length)
    rows = []
    for number, window in enumerate(input_ids):
        cache, losses = None, []
        for start in range(0, length - 1, chunk):
            piece = window[start : start + chunk + 1].to(model.device)
            # The last token of a piece is the first to be read of the next one.
            outputs = model(input_ids=piece[None, :-1], cache=cache, use_cache=True)
            cache = outputs.cache
            losses.append(F.cross_entropy(outputs.logits[0].float(), piece[1:], reduction="none").cpu())
            if progress is not None:
                progress(number * length + start + len(piece), windows * length)
        rows.append(torch.cat(losses))
    return torch.stack(rows)


@dataclass(frozen=True)
class Bucket:
    """Positions `start` to `end` (in tokens, the first is 0), their mean loss in nats, and its standard error over the
    stretches of text; None with one stretch."""

    start: int
    end: int
    nll: float
    stderr: float | None


def buckets(nll: Tensor, count: int = 16) -> list[Bucket]:
    """`[W, T - 1]` losses by position in at most `count` buckets of equal widths."""
    width = -(-nll.shape[1] // count)
    result = []
    for start in range(0, nll.shape[1], width):
        means = nll[:, start : start + width].double().mean(dim=1)
        stderr = (means.std() / len(means) ** 0.5).item() if len(means) > 1 else None
        result.append(Bucket(start + 1, min(start + width, nll.shape[1]) + 1, means.mean().item(), stderr))
    return result


def position_limit(model: PreTrainedModel) -> int | None:
    """The most tokens that a learned table of positions has room for; None for a model without one."""
    limits = [
        # Some tables keep their first rows for padding.
        module.num_embeddings - getattr(module, "offset", 0)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and ("position" in name or name.rpartition(".")[2] == "wpe")
    ]
    return min(limits, default=None)


def require_positions(model: PreTrainedModel, length: int) -> None:
    """Raises `ValueError` where `length` tokens go beyond a learned table of positions."""
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise ValueError(
            f"{length} tokens are more than the {limit} rows of the model's table of learned positions: "
            f"{type(model).__name__} cannot be run beyond it; give lengths up to {limit}"
        )
