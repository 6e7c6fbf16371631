"""What every configuration and every setting of a run is checked with: one error that names field, value and remedy."""

import math
from collections.abc import Collection
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def validate_choice(field: str, value: Any, choices: Collection) -> None:
    """Raises `ValueError` naming field and value unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{field} is {value!r}: give one of {', '.join(repr(choice) for choice in choices)}")


def validate_at_least(field: str, value: int, least: int, why: str = "") -> None:
    """Raises `ValueError` naming field and value unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{field} is {value!r}: give a whole number of at least {least}{why}")
    if value < least:
        raise ValueError(f"{field} is {value}: give at least {least}{why}")


def validate_range(
    field: str, value: float, low: float, high: float = math.inf, *, above: bool = False, below: bool = False
) -> None:
    """Raises `ValueError` naming field and value unless `value` is a finite number from `low` to `high`.

    Args:
        above: `low` itself is out of range too.
        below: `high` itself is out of range too.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    inside = is_number and math.isfinite(value) and (low < value if above else low <= value)
    if not (inside and (value < high if below else value <= high)):
        lower = f"above {low}" if above else f"of at least {low}"
        upper = "" if high == math.inf else f" and {'below' if below else 'at most'} {high}"
        raise ValueError(f"{field} is {value!r}: give a finite number {lower}{upper}")


def validate_rope_parameters(parameters: dict | None) -> None:
    """Raises `ValueError` for rotary parameters that the zoo's models would not follow."""
    parameters = parameters or {}
    kind, factor = parameters.get("rope_type", "default"), parameters.get("partial_rotary_factor", 1.0)
    validate_choice("rope_parameters['rope_type']", kind, ("default", *ROPE_INIT_FUNCTIONS))
    if "rope_theta" in parameters:
        validate_range("rope_parameters['rope_theta']", parameters["rope_theta"], 0, above=True)
    if factor not in (None, 1.0):
        raise ValueError(f"rope_parameters['partial_rotary_factor'] is {factor}: whole heads are rotated, leave it out")


def validate_activation(field: str, value: str) -> None:
    """Raises `ValueError` naming field and value unless transformers has an activation of that name."""
    # Not at the head of the file: it imports torch, which importing a configuration need not wait for.
    from transformers.activations import ACT2FN

    validate_choice(field, value, ACT2FN)
