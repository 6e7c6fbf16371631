"""MLP widths that change with depth at a fixed budget (tapered language models, arXiv 2606.23670): pure functions."""

import math
from fractions import Fraction

from .validators import validate_at_least, validate_choice, validate_range

SCHEDULES = ("cosine", "linear", "sigmoid", "step", "reverse", "uniform")
SIGMOID_STEEPNESS = 10.0


def schedule_value(schedule: str, depth: float, start: float, end: float) -> float:
    """The width at `depth` in [0, 1] before rounding, for a decreasing schedule that goes from `start` to `end`."""
    if schedule == "linear":
        return start - (start - end) * depth
    if schedule == "cosine":
        return end + (start - end) / 2 * (1 + math.cos(math.pi * depth))
    if schedule == "sigmoid":
        return end + (start - end) / (1 + math.exp(SIGMOID_STEEPNESS * (depth - 0.5)))
    # Thirds; the last layer belongs to the last of them.
    return [start, (start + end) / 2, end][min(int(3 * depth), 2)]


def tapered_widths(
    num_layers: int,
    intermediate_size: int,
    schedule: str = "cosine",
    start: float = 1.5,
    end: float = 0.5,
    multiple_of: int = 16,
) -> list[int]:
    """MLP widths per layer, never increasing with depth, whose mean is exactly `intermediate_size`.

    The first and last widths are exactly `start` and `end` times `intermediate_size`. The others follow the schedule,
    are rounded to `multiple_of`, and give or take one multiple where rounding left the sum off, those first that are
    farthest from the schedule. A gated or plain MLP has parameters and FLOPs proportional to its width, so a tapered
    model costs exactly what the uniform one does.

    Args:
        num_layers: layers, at least 1. A single layer keeps the mean.
        intermediate_size: the mean width.
        schedule: `cosine`, `linear`, `sigmoid` (steepness 10), `step` (thirds), `reverse` (the cosine one from the last
            layer to the first: wider late, a control) or `uniform` (every layer the mean, a control).
        start: first width over the mean, at least 1.
        end: last width over the mean, above 0 and at most 1.
        multiple_of: what every width of a schedule other than `uniform` is a multiple of.

    Raises:
        ValueError: for values out of range, and for a budget that can't be met exactly: it names one that can.
    """
    validate_at_least("num_layers", num_layers, 1)
    validate_at_least("intermediate_size", intermediate_size, 1)
    validate_choice("schedule", schedule, SCHEDULES)
    validate_range("start", start, 1)
    validate_range("end", end, 0, 1, above=True)
    validate_at_least("multiple_of", multiple_of, 1)
    if num_layers == 1 or schedule == "uniform":
        return [intermediate_size] * num_layers
    if why := _misfit(num_layers, intermediate_size, start, end, multiple_of):
        raise ValueError(f"{why}; {_remedy(num_layers, intermediate_size, start, end, multiple_of)}")
    # In units of `multiple_of` from here on.
    first, last = (int(width / multiple_of) for width in _end_widths(intermediate_size, start, end))
    total = num_layers * intermediate_size // multiple_of
    units = _round_to_sum(_interior(num_layers, schedule, first, last), total - first - last, last, first)
    widths = [multiple_of * count for count in (first, *units, last)]
    return widths[::-1] if schedule == "reverse" else widths


def _interior(num_layers: int, schedule: str, first: float, last: float) -> list[float]:
    """The schedule's values at all layers but the first and last."""
    decreasing = "cosine" if schedule == "reverse" else schedule
    return [schedule_value(decreasing, layer / (num_layers - 1), first, last) for layer in range(1, num_layers - 1)]


def _end_widths(intermediate_size: int, start: float, end: float) -> tuple[Fraction, Fraction]:
    """First and last width, exactly: 1.1 means 11/10 and not the nearest binary number."""
    return tuple(intermediate_size * Fraction(share).limit_denominator(10**6) for share in (start, end))


def _misfit(num_layers: int, intermediate_size: int, start: float, end: float, multiple_of: int) -> str | None:
    """Why no widths meet the budget exactly, or None if some do."""
    first, last = _end_widths(intermediate_size, start, end)
    for name, share, width in (("start", start, first), ("end", end, last)):
        if width % multiple_of != 0:
            return (
                f"{name} {share} of intermediate_size {intermediate_size} is {float(width):g}, no multiple of "
                f"{multiple_of}"
            )
    budget = num_layers * intermediate_size
    if budget % multiple_of != 0:
        return f"{num_layers} layers of intermediate_size {intermediate_size} make no multiple of {multiple_of}"
    inner = num_layers - 2
    if not inner * last <= budget - first - last <= inner * first:
        return (
            f"{num_layers} layers from start {start} to end {end} of intermediate_size {intermediate_size} can't have "
            "that as their mean"
        )
    return None


def _remedy(num_layers: int, intermediate_size: int, start: float, end: float, multiple_of: int) -> str:
    """The nearest mean width or the largest multiple that makes the budget fit."""
    fits = [
        width
        for distance in range(1, max(intermediate_size, 64 * multiple_of))
        for width in (intermediate_size + distance, intermediate_size - distance)
        if width > 0 and _misfit(num_layers, width, start, end, multiple_of) is None
    ][:1]
    multiples = [
        candidate
        for candidate in range(multiple_of - 1, 0, -1)
        if _misfit(num_layers, intermediate_size, start, end, candidate) is None
    ][:1]
    ways = [f"intermediate_size={width}" for width in fits] + [f"multiple_of={candidate}" for candidate in multiples]
    return f"{' or '.join(ways)} works" if ways else "give start and end a mean of 1, as 1.5 and 0.5 have"


def _round_to_sum(values: list[float], total: int, low: int, high: int) -> list[int]:
    """Whole numbers near the decreasing `values`, in [low, high] and in the same order, that sum to `total`."""
    if not values:
        return []
    shift = _shift_to_sum(values, total, low, high)
    wanted = [min(max(value + shift, low), high) for value in values]
    units = [math.floor(value + 0.5) for value in wanted]
    while (missing := total - sum(units)) != 0:
        step = 1 if missing > 0 else -1
        movable = [
            layer
            for layer, count in enumerate(units)
            if (low <= count + step <= high)
            and (step < 0 or layer == 0 or count < units[layer - 1])
            and (step > 0 or layer == len(units) - 1 or count > units[layer + 1])
        ]
        units[max(movable, key=lambda layer: step * (wanted[layer] - units[layer]))] += step
    return units


def _shift_to_sum(values: list[float], total: int, low: int, high: int) -> float:
    """What to add to all `values`, clipped to [low, high], so that they sum to `total`: nothing if they do already."""
    if math.isclose(sum(values), total, rel_tol=1e-9):
        return 0.0
    below, above = float(low - high), float(high - low)
    for _ in range(64):
        shift = (below + above) / 2
        if sum(min(max(value + shift, low), high) for value in values) < total:
            below = shift
        else:
            above = shift
    return (below + above) / 2
