"""Training-free looping: a window of a frozen decoder's middle layers, run again in damped steps (arXiv 2605.23872).

With g the layers of the window and x_0 what enters it,

    x_{k+1} = (1 - 1/K) x_k + g(x_k) / K,   k = 0 ... K - 1
    output  = beta g(x_0) + (1 - beta) x_K

The pass over x_0 writes keys, values and states into the cache as the plain model does. The other passes read those
keys and values, of all tokens up to their own, and write nothing. So what a token gets does not depend on how the
tokens before it were cut into calls: a prompt in one piece, in chunks, or decoded token by token. That the keys are
x_0's in every pass is our reading of the paper, whose code is not public. A recurrent state can't be read so: those of
linear heads start each pass at the state before the call and run on x_k's own tokens, without leaving a trace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from hf_hybrid.conversion.depth_asymmetry import decoder_layers
from hf_hybrid.conversion.measure import heldout_nll, repeated_span
from hf_hybrid.conversion.source_model import SourceError
from hf_hybrid.validators import validate_at_least, validate_choice, validate_range

RULES = ("damped", "naive")
# Where the paper's windows lie: their centres over the depth of the model, and their layers.
CENTRES = (0.45, 0.60)
WINDOW_SIZE = 4


def damped_steps(window: Callable[[Tensor], Tensor], first: Tensor, inputs: Tensor, steps: int, beta: float) -> Tensor:
    """The formula of the module's head. `first` is window(inputs), which the caller has already."""
    states = (1 - 1 / steps) * inputs + first / steps
    for _ in range(1, steps):
        states = (1 - 1 / steps) * states + window(states) / steps
    return beta * first + (1 - beta) * states


def naive_steps(window: Callable[[Tensor], Tensor], first: Tensor, inputs: Tensor, steps: int, beta: float) -> Tensor:
    """The window `steps` times, each on what the one before returned; `beta` plays no part."""
    states = first
    for _ in range(1, steps):
        states = window(states)
    return states


class LayerLoop:
    """A loop over layers of a model, in force until [`LayerLoop.remove`] or the end of a `with` block."""

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[nn.Module], start: int, rule: Callable, steps: int, beta: float
    ):
        self.model, self.layers, self.start, self.steps, self.beta = model, list(layers), start, steps, beta
        self._rule = rule
        self._forwards = [layer.forward for layer in self.layers]
        self._arguments: list[dict[str, Any]] = []
        for position, layer in enumerate(self.layers):
            layer.forward = self._run if position == len(self.layers) - 1 else self._defer

    def remove(self) -> None:
        """Gives the layers their own forward passes back."""
        for layer in self.layers:
            vars(layer).pop("forward", None)

    def __enter__(self) -> LayerLoop:
        return self

    def __exit__(self, *error) -> None:
        self.remove()

    def _defer(self, hidden_states: Tensor, **kwargs) -> Tensor:
        """All layers but the window's last: keep the arguments (layers may have masks of their own), do nothing."""
        self._arguments.append(kwargs)
        return hidden_states

    def _run(self, hidden_states: Tensor, **kwargs) -> Tensor:
        arguments, self._arguments = [*self._arguments, kwargs], []
        cache = kwargs.get("cache")
        if cache is None:
            # Keys of the first pass are read by the others, so they must be kept somewhere.
            cache = DynamicCache(config=self.model.config)
            arguments = [{**own, "cache": cache} for own in arguments]

        def window(states: Tensor) -> Tensor:
            for forward, own in zip(self._forwards, arguments, strict=True):
                states = forward(states, **own)
                if not isinstance(states, Tensor):
                    raise SourceError(f"layers of {type(self.model).__name__} return more than their states")
            return states

        linear = [
            layer
            for layer in cache.layers[self.start : self.start + len(self.layers)]
            if isinstance(layer, LinearAttentionCacheLayerMixin)
        ]
        before = [_states(layer) for layer in linear]
        with _recorded_updates(cache) as read:
            first = window(hidden_states)

        def trace_free_window(states: Tensor) -> Tensor:
            with _read_only(cache, read), _swapped(linear, before):
                return window(states)

        return self._rule(trace_free_window, first, hidden_states, self.steps, self.beta)


def loop_layers(
    model: PreTrainedModel, start: int, end: int, steps: int = 3, beta: float = 0.5, *, rule: str = "damped"
) -> LayerLoop:
    """Applies the layers `start` to `end` - 1 of a decoder `steps` times in each forward pass from now on.

    `generate`, caches and batches work as before, and the cache is as large as before. The weights and their names stay
    as they are: a model saved meanwhile is the plain one.

    Args:
        model: a causal language model or decoder of transformers or the zoo; it is changed in place.
        start, end: the window, from 0; the layer `end` is outside of it.
        steps: K. With 1 the model is the plain one.
        beta: share of the plain output, in [0, 1].
        rule: `"damped"`, or `"naive"` for comparison.

    Returns:
        A handle; `with loop_layers(model, 12, 16): ...` or `.remove()` ends the loop.

    Raises:
        ValueError: a window that the model doesn't have, or one of whose layers is in a loop; values out of range.
    """
    layers = decoder_layers(model)
    check_window(start, end, len(layers))
    validate_at_least("steps", steps, 1)
    validate_range("beta", beta, 0, 1)
    validate_choice("rule", rule, RULES)
    if busy := [index for index in range(start, end) if "forward" in vars(layers[index])]:
        raise SourceError(f"layer {busy[0]} is in a loop already, or wrapped by another library: remove that first")
    return LayerLoop(model, layers[start:end], start, damped_steps if rule == "damped" else naive_steps, steps, beta)


def check_window(start: int, end: int, num_layers: int) -> None:
    """Raises `SourceError` unless the layers `start` to `end` - 1 are one or more of `num_layers`."""
    if not 0 <= start < end <= num_layers:
        raise SourceError(
            f"the window is {start}:{end}, but the model has the layers 0:{num_layers}: give some of them"
        )


def middle_windows(num_layers: int, size: int = WINDOW_SIZE) -> list[tuple[int, int]]:
    """(start, end) of the windows of `size` layers whose centres lie where the paper found them to help."""
    low, high = CENTRES
    centred = [
        (start, start + size)
        for start in range(num_layers - size + 1)
        if low <= (start + size / 2) / num_layers <= high
    ]
    if not centred:
        raise SourceError(f"no window of {size} layers lies in the middle of {num_layers}: name windows, such as 1:3")
    return centred


@dataclass(frozen=True)
class LoopScore:
    """One setting's loss on a text in nats a token, and its top-1 accuracy at copying a span; window None = plain."""

    window: tuple[int, int] | None
    steps: int
    rule: str
    nll: float
    copy_top1: float


def evaluate_loops(
    model: PreTrainedModel,
    windows: Tensor,
    settings: Sequence[tuple[tuple[int, int], int, str]],
    *,
    beta: float = 0.5,
    copy_distance: int = 256,
    seed: int = 0,
) -> Iterator[LoopScore]:
    """Scores the plain model, then each (window, steps, rule) of `settings`.

    Args:
        windows: `[W, T]` token windows of a text.
        beta: share of the plain output.
        copy_distance: tokens between the two copies of a random span of the text's tokens.
        seed: of the spans.
    """
    for setting in [None, *settings]:
        window, steps, rule = setting or (None, 1, "plain")
        if window is None:
            scores = _scores(model, windows, copy_distance, seed)
        else:
            with loop_layers(model, *window, steps=steps, beta=beta, rule=rule):
                scores = _scores(model, windows, copy_distance, seed)
        yield LoopScore(window, steps, rule, *scores)


def _scores(model: PreTrainedModel, windows: Tensor, distance: int, seed: int) -> tuple[float, float]:
    return heldout_nll(model, windows), repeated_span(model, windows.flatten(), (distance,), seed=seed)[0].top1


def _states(layer: LinearAttentionCacheLayerMixin) -> dict[str, dict]:
    """A copy of what a linear layer of a cache holds: stock ones keep it in dictionaries by the state's number."""
    return {name: copy.deepcopy(value) for name, value in vars(layer).items() if isinstance(value, dict)}


@contextmanager
def _recorded_updates(cache: Cache) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Updates do what they do; the keys and values that they return are kept by layer."""
    read, update = {}, cache.update

    def recording(key: Tensor, value: Tensor, layer_idx: int, *args, **kwargs):
        read[layer_idx] = update(key, value, layer_idx, *args, **kwargs)
        return read[layer_idx]

    cache.update = recording
    try:
        yield read
    finally:
        del cache.update


@contextmanager
def _read_only(cache: Cache, read: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Updates return the keys and values of `read` and write nothing."""
    cache.update = lambda key, value, layer_idx, *args, **kwargs: read[layer_idx]
    try:
        yield
    finally:
        del cache.update


@contextmanager
def _swapped(layers: Sequence[LinearAttentionCacheLayerMixin], states: Sequence[dict[str, dict]]) -> Iterator[None]:
    """The layers hold copies of `states`, and afterwards what they held before."""
    kept = [{name: vars(layer)[name] for name in own} for layer, own in zip(layers, states, strict=True)]
    for layer, own in zip(layers, states, strict=True):
        vars(layer).update(copy.deepcopy(own))
    try:
        yield
    finally:
        for layer, own in zip(layers, kept, strict=True):
            vars(layer).update(own)
