"""From a head map and a budget to the query heads that stay full attention, layer by layer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from hf_hybrid.conversion.files import read_json, write_atomically
from hf_hybrid.conversion.head_map import GRANULARITIES, HeadMap

FORMAT = "hf_hybrid.allocation"
VERSION = 1

STRATEGIES = {
    "rpd": "the units with the lowest RPD of the whole model",
    "inverted": "the units with the highest score of the whole model",
    "random": "units drawn with a seed",
    "uniform": "the same number in every layer, the lowest scores inside it",
    "layerwise": "whole layers, evenly spread or every period-th",
    "scores": "the lowest scores of an imported map (DuoAttention, Retrieval_Head)",
}


class AllocationError(ValueError):
    """An allocation cannot be made, read or used; the message names the setting, its value and what is right."""


@dataclass(frozen=True)
class Allocation:
    """Which query heads are full attention (FA), and how that was decided.

    Attributes:
        full_attention_heads: the FA query heads of each layer, ascending.
        scores: the score of each unit [layers][units] that was ranked (low = FA); units are query heads or KV groups.
        settings: strategy, granularity, share asked for, bounds, seed, period.
        model, revision, map_digest: the model, and the map that the scores are from.
        num_attention_heads, num_key_value_heads: of the source model.
    """

    full_attention_heads: list[list[int]]
    scores: list[list[float]]
    settings: dict[str, Any]
    model: str
    revision: str | None
    map_digest: str
    num_attention_heads: int
    num_key_value_heads: int

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "num_key_value_heads"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise AllocationError(f"{name} is {value!r}, must be a whole number of at least 1")
        for name, kinds in {"settings": dict, "model": str, "revision": (str, type(None)), "map_digest": str}.items():
            if not isinstance(getattr(self, name), kinds):
                raise AllocationError(f"{name} is {getattr(self, name)!r}, must be {_names(kinds)}")
        if missing := {"strategy", "granularity", "full_attention_share"} - self.settings.keys():
            raise AllocationError(f"settings lack {sorted(missing)[0]!r}")
        if self.settings["granularity"] not in GRANULARITIES:
            raise AllocationError(
                f"granularity is {self.settings['granularity']!r}, must be one of {', '.join(GRANULARITIES)}"
            )
        _check_grid("full_attention_heads", self.full_attention_heads, int)
        _check_grid("scores", self.scores, float)
        sizes = {len(layer) for layer in self.scores}
        if len(self.scores) != len(self.full_attention_heads) or len(sizes) != 1:
            raise AllocationError(
                f"scores have {len(self.scores)} layers of {sorted(sizes)} units, must have the"
                f" {len(self.full_attention_heads)} layers of full_attention_heads, with one number of units in each"
            )
        if sizes - {self.num_attention_heads, self.num_key_value_heads} or 0 in sizes:
            raise AllocationError(
                f"scores have {sizes.pop()} units a layer, must have num_attention_heads {self.num_attention_heads} or"
                f" num_key_value_heads {self.num_key_value_heads}"
            )
        for layer, heads in enumerate(self.full_attention_heads):
            if heads != sorted(set(heads)) or any(not 0 <= head < self.num_attention_heads for head in heads):
                raise AllocationError(
                    f"full_attention_heads of layer {layer} is {heads}, must be ascending, distinct and in"
                    f" 0 .. {self.num_attention_heads - 1}"
                )

    @property
    def units(self) -> int:
        """What the budget is counted in: all KV groups, or all query heads, of the model."""
        return sum(len(layer) for layer in self.scores)

    @property
    def full_attention_units(self) -> int:
        """How many units (KV groups or query heads) stay full attention."""
        heads = sum(len(layer) for layer in self.full_attention_heads)
        return heads * self.units // (self.num_attention_heads * len(self.scores))

    @property
    def share(self) -> float:
        """The share of units that are FA, which differs from the share asked for by rounding to whole units."""
        return self.full_attention_units / self.units

    def check_model(self, config: Any) -> None:
        """Raise AllocationError unless a transformers config has this allocation's layers, heads and KV heads."""
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        expected = {
            "num_hidden_layers": len(self.full_attention_heads),
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
        }
        for name, value in expected.items():
            actual = getattr(config, name, None)
            if name == "num_key_value_heads" and actual is None:
                actual = config.num_attention_heads
            if actual != value:
                raise AllocationError(f"the allocation is for {name} {value} ({self.model}), the model has {actual}")

    def save(self, path: str | Path) -> None:
        """Write JSON, one field a line, atomically; an existing file is replaced."""
        content = {"format": FORMAT, "version": VERSION, "share": self.share, **asdict(self)}
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
        write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())

    @classmethod
    def load(cls, path: str | Path, config: Any = None) -> Allocation:
        """Read and check a file written by `save`; with a transformers `config`, check that it fits that model.

        Raises:
            AllocationError: if the file is not an allocation, has another version, is inconsistent or does not fit.
        """
        content = read_json(path, error=AllocationError)
        if (kind := content.get("format")) != FORMAT:
            raise AllocationError(f"{path} is not an allocation: its format is {kind!r}, must be {FORMAT!r}")
        if content.get("version") != VERSION:
            raise AllocationError(
                f"{path} has allocation version {content.get('version')!r}; this program reads {VERSION}"
            )
        names = [entry.name for entry in fields(cls)]
        if missing := [name for name in names if name not in content]:
            raise AllocationError(f"{path} lacks the field {missing[0]!r}")
        try:
            allocation = cls(**{name: content[name] for name in names})
        except AllocationError as error:
            raise AllocationError(f"{path}: {error}") from error
        if config is not None:
            allocation.check_model(config)
        return allocation


def _check_grid(name: str, grid: Any, number: type) -> None:
    rows = grid if isinstance(grid, list) else [None]
    if not rows or not all(isinstance(row, list) and all(type(value) is number for value in row) for row in rows):
        raise AllocationError(f"{name} must be one list of {number.__name__} per layer")
    if wrong := [value for row in rows for value in row if not math.isfinite(value)]:
        raise AllocationError(f"{name} hold {wrong[0]}, must be finite")


def _names(kinds: type | tuple[type, ...]) -> str:
    return " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))


def allocate(
    head_map: HeadMap,
    *,
    full_attention_share: float = 0.25,
    strategy: str = "rpd",
    granularity: str = "kv_group",
    minimum_per_layer: int = 0,
    maximum_per_layer: int | None = None,
    seed: int = 0,
    period: int | None = None,
) -> Allocation:
    """Choose the full-attention heads of a model.

    The budget is counted in units (KV groups, each a KV head with all its query heads, or single query heads): exactly
    floor(full_attention_share * all units + 1/2). Equal scores are taken in the order of layer, then head.

    Args:
        strategy: "rpd": the lowest RPD of the whole model, so that each layer gets a number of its own; "scores": the
            same for a map imported from another tool; "inverted": the highest; "random": drawn with `seed`; "uniform":
            the same number in every layer (one more in some where the budget does not divide), the lowest inside it;
            "layerwise": as many whole layers as fit into the budget, evenly spread, or with `period` p every p-th layer
            (1 : p - 1) whatever the share.
        minimum_per_layer, maximum_per_layer: bounds on the units of each layer.

    Raises:
        AllocationError: if a setting is out of range, or the budget cannot be spent exactly within the bounds.
    """
    if strategy not in STRATEGIES:
        raise AllocationError(f"strategy is {strategy!r}, must be one of {', '.join(STRATEGIES)}")
    if granularity not in GRANULARITIES:
        raise AllocationError(f"granularity is {granularity!r}, must be one of {', '.join(GRANULARITIES)}")
    if isinstance(full_attention_share, str) or not 0 <= full_attention_share <= 1:
        raise AllocationError(f"full_attention_share is {full_attention_share!r}, must be a number in 0 .. 1")
    source = head_map.metadata["source"]
    if strategy == "rpd" and source != "hf_hybrid":
        raise AllocationError(f"strategy 'rpd' needs a map of RPD; the scores of {source} are ranked by 'scores'")
    if strategy == "scores" and source == "hf_hybrid":
        raise AllocationError("strategy 'scores' ranks the map of another tool; this map holds RPD: use 'rpd'")
    if granularity == "query_head" and head_map.metadata["granularity"] == "kv_group":
        raise AllocationError("granularity 'query_head' needs a map per query head; this one has one score a KV group")

    folded = head_map.fold_to_groups() if granularity == "kv_group" else head_map
    scores = folded.rpd.double()
    layers, units = scores.shape
    # Fraction(str()) reads the share as the decimal that was typed: 0.35 of 90 is 31.5, not 31.499999999999996.
    budget = math.floor(Fraction(str(full_attention_share)) * layers * units + Fraction(1, 2))

    if strategy == "layerwise":
        if minimum_per_layer or maximum_per_layer is not None:
            raise AllocationError("strategy 'layerwise' takes whole layers: it has no minimum or maximum per layer")
        chosen = _whole_layers(layers, units, budget, period)
    elif period is not None:
        raise AllocationError(f"period is {period}, but strategy {strategy!r} has none: only 'layerwise' does")
    else:
        if strategy == "inverted":
            ranking = -scores
        elif strategy == "random":
            ranking = torch.rand(scores.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        else:
            ranking = scores
        if not 0 <= minimum_per_layer <= units:
            raise AllocationError(f"minimum_per_layer is {minimum_per_layer}: give 0 to {units}, the units of a layer")
        if maximum_per_layer is not None and maximum_per_layer < max(minimum_per_layer, 1):
            raise AllocationError(
                f"maximum_per_layer is {maximum_per_layer}: give at least {max(minimum_per_layer, 1)}"
                + (", the minimum_per_layer" if minimum_per_layer > 1 else "")
            )
        low, high = minimum_per_layer, units if maximum_per_layer is None else min(maximum_per_layer, units)
        if strategy == "uniform":
            low, high = max(low, budget // layers), min(high, -(-budget // layers))
        if not (0 <= low <= high and layers * low <= budget <= layers * high):
            raise AllocationError(
                f"the budget is {budget} of {layers * units} units in {layers} layers of {units}, which strategy"
                f" {strategy!r} cannot spend with minimum_per_layer {minimum_per_layer} and maximum_per_layer"
                f" {maximum_per_layer}: these allow {layers * max(low, 0)} to {layers * high} units"
            )
        chosen = _lowest_within_bounds(ranking.tolist(), budget, low, high)

    size = head_map.metadata["num_attention_heads"] // units
    return Allocation(
        full_attention_heads=[[unit * size + i for unit in layer for i in range(size)] for layer in chosen],
        scores=scores.tolist(),
        settings={
            "strategy": strategy,
            "granularity": granularity,
            "full_attention_share": full_attention_share,
            "minimum_per_layer": minimum_per_layer,
            "maximum_per_layer": maximum_per_layer,
            "seed": seed,
            "period": period,
        },
        model=head_map.metadata["model"],
        revision=head_map.metadata["revision"],
        map_digest=head_map.digest(),
        num_attention_heads=head_map.metadata["num_attention_heads"],
        num_key_value_heads=head_map.metadata["num_key_value_heads"],
    )


def _lowest_within_bounds(ranking: list[list[float]], budget: int, low: int, high: int) -> list[list[int]]:
    """The `budget` units with the smallest sum of scores such that each layer has low..high; greedy is optimal here."""
    order = [sorted(range(len(layer)), key=layer.__getitem__) for layer in ranking]
    counts = [low] * len(ranking)
    # Only units between the bounds compete: those below are taken in any case, those above in none.
    rivals = sorted((ranking[layer][unit], layer, unit) for layer, o in enumerate(order) for unit in o[low:high])
    for _, layer, _ in rivals[: budget - low * len(ranking)]:
        counts[layer] += 1
    return [sorted(o[:count]) for o, count in zip(order, counts, strict=True)]


def _whole_layers(layers: int, units: int, budget: int, period: int | None) -> list[list[int]]:
    if period is None:
        count = budget // units
        if budget and not count:
            raise AllocationError(f"the budget is {budget} units, but one whole layer has {units}: raise the share")
        full = {(index + 1) * layers // count - 1 for index in range(count)}
    else:
        if not 1 <= period <= layers:
            raise AllocationError(f"period is {period}, must be in 1 .. {layers} (the number of layers)")
        full = set(range(period - 1, layers, period))
    return [list(range(units)) if layer in full else [] for layer in range(layers)]


def cached_key_value_heads(
    full_attention_heads: Sequence[Sequence[int]], num_attention_heads: int, num_key_value_heads: int
) -> int:
    """The KV heads, summed over layers, that some full-attention query head reads."""
    group_size = num_attention_heads // num_key_value_heads
    return sum(len({head // group_size for head in heads}) for heads in full_attention_heads)


def cache_bytes_per_token(
    full_attention_heads: Sequence[Sequence[int]],
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    bytes_per_element: int,
) -> int:
    """Bytes by which the KV cache grows with each token: keys and values of every cached KV head.

    At KV-group granularity this is the source's figure times the FA share, exactly. The states of linear heads do not
    grow and are not counted.
    """
    kv_heads = cached_key_value_heads(full_attention_heads, num_attention_heads, num_key_value_heads)
    return 2 * kv_heads * head_dim * bytes_per_element


def draw_heads(full_attention_heads: Sequence[Sequence[int]], num_attention_heads: int) -> str:
    """A text map: one row a layer, one character a query head (`#` full attention, `.` linear), then the FA count."""
    width = len(str(len(full_attention_heads) - 1))
    rows = (
        f"{layer:>{width}} {''.join('#' if head in heads else '.' for head in range(num_attention_heads))} {len(heads)}"
        for layer, heads in enumerate(full_attention_heads)
    )
    return "\n".join(rows)
