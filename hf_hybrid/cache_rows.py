"""Some rows of a batch as a cache of their own, for rows that the layers must read in different orders.

Works on the stock cache layers of transformers, dynamic and static, of keys and values, windows, convolution and
recurrent states. All of them keep what belongs to rows in tensors `[B, ...]` of two dimensions or more, in attributes
or in dictionaries; everything else (lengths, sizes, flags) is the same for all rows.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache


def take_rows(cache: Cache, rows: torch.LongTensor) -> Cache:
    """A cache of the rows `rows` `[R]` only; `cache` and it share no tensor that an update writes to."""
    return Cache(layers=[_rebuild(layer, lambda value: _taken(value, rows)) for layer in cache.layers])


def put_rows(cache: Cache, parts: Sequence[Cache], rows: Sequence[torch.LongTensor]) -> None:
    """Writes into `cache` what its rows became in `parts`, which [`take_rows`] made, or which are new.

    Args:
        cache: the cache of all rows, as many layers as each part has.
        parts: one cache for each set of rows.
        rows: `[R_i]` the rows of each part; together each row of the batch once.
    """
    order = torch.cat(list(rows)).argsort()
    for layer, *pieces in zip(cache.layers, *(part.layers for part in parts), strict=True):
        for name in vars(pieces[0]):
            joined = _joined([vars(piece)[name] for piece in pieces], order, vars(layer).get(name))
            # Static layers write their number of rows down.
            vars(layer)[name] = len(order) if name == "batch_size" else joined


def _rebuild(layer: Any, change) -> Any:
    part = copy.copy(layer)
    for name, value in vars(layer).items():
        vars(part)[name] = change(value)
    return part


def _taken(value: Any, rows: torch.LongTensor) -> Any:
    if isinstance(value, dict):
        return {key: _taken(item, rows) for key, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    return value.index_select(0, rows.to(value.device)) if value.dim() > 1 else value.clone()


def _joined(pieces: list[Any], order: torch.LongTensor, target: Any) -> Any:
    """The pieces' rows in the order of the batch; in place where `target` has their shape, as static caches need."""
    first = pieces[0]
    if isinstance(first, dict):
        known = target if isinstance(target, dict) else {}
        return {key: _joined([piece[key] for piece in pieces], order, known.get(key)) for key in first}
    if not isinstance(first, torch.Tensor):
        return first
    joined = torch.cat(pieces).index_select(0, order.to(first.device)) if first.dim() > 1 else first
    if isinstance(target, torch.Tensor) and target.shape == joined.shape and not joined.requires_grad:
        return target.copy_(joined)
    return joined
