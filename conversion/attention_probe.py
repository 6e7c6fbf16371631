"""The attention probe: every layer's queries and keys, with and without their rotary embedding, for any RoPE model.

transformers hands the rotated queries and keys of each layer to a function that is looked up by name. The probe
registers itself there, undoes the rotation with the cos and sin that the layer was given, shows both to a callback and
computes the layer's attention as sdpa would, so that the forward pass is unchanged. Nothing is kept between layers.

How a layer lays its rotary pairs out, and whether it rotates at all, is found by experiment: the first time a layer is
seen it is run once more with the identity as its rotation, and the layout is the one that turns those vectors into the
rotated ones. So scaled RoPE (Llama-3.1, YaRN, linear), partial rotary, local and global bases, QK-norm, biases and NoPE
layers need no code per architecture, and a layout that is neither half-split nor interleaved is refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid.conversion.source_model import SourceError

IMPLEMENTATION = "hf_hybrid_probe"


@dataclass(frozen=True)
class RotaryLayout:
    """Which head dimensions form the rotary pairs.

    Attributes:
        name: "half-split" (pair f is dimensions f and f + F) or "interleaved" (2f and 2f + 1).
        pairs: [F, 2] dimensions of each pair; those in no pair are not rotated.
    """

    name: str
    pairs: Tensor


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of one layer in one forward pass.

    Attributes:
        layout: the pairs, F of them.
        cos, sin: [B or 1, T, F]; both carry the layer's amplitude (YaRN's attention factor; 1 elsewhere).
    """

    layout: RotaryLayout
    cos: Tensor
    sin: Tensor

    @property
    def wavelengths(self) -> Tensor:
        """[F] tokens per turn, 2 pi / w_f, from the angle between the first two positions."""
        angle = torch.atan2(self.sin, self.cos)[0, :2].double()
        step = (angle[1] - angle[0]).remainder(2 * math.pi)
        return (2 * math.pi / step).float()

    def at(self, positions: Tensor) -> Rotary:
        """The rotary embedding of the tokens at `positions` alone."""
        return replace(self, cos=self.cos[:, positions], sin=self.sin[:, positions])

    def rotate(self, x: Tensor) -> Tensor:
        """x [B, H, T, D] as the layer rotates it."""
        return self._turn(x, self.cos, self.sin)

    def unrotate(self, x: Tensor, *, keep_amplitude: bool = False) -> Tensor:
        """The inverse of `rotate`; with `keep_amplitude`, x as the layer would hand it over at position 0.

        The amplitude is a temperature of the logits and not a position, so what a head does without RoPE keeps it.
        """
        norm = self.cos.square() + self.sin.square()
        if keep_amplitude:
            norm = norm.sqrt()
        return self._turn(x, self.cos / norm, -self.sin / norm)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [B or 1, 1, T, F]
        first, second = self.layout.pairs.unbind(-1)
        turned = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        x, y = turned[..., first], turned[..., second]
        turned[..., first] = x * cos - y * sin
        turned[..., second] = y * cos + x * sin
        return turned


@dataclass(frozen=True)
class LayerAttention:
    """What one layer hands to its attention function. B sequences, H query heads, K KV heads, T tokens.

    Attributes:
        layer_idx: the layer's index.
        query: [B, H, T, D] after QK-norm and rotation. key: [B, K, T, D]; query head h reads KV head h // (H // K).
        scaling: the factor on the logits.
        softcap: c of c * tanh(logit / c), or None.
        mask: [B, 1, T, T] bool, True where a query (row) may attend a key; None = causal.
        rotary: the layer's rotary embedding, or None where it has none (NoPE).
    """

    layer_idx: int
    query: Tensor
    key: Tensor
    scaling: float
    softcap: float | None
    mask: Tensor | None
    rotary: Rotary | None

    def unrotated(self, *, keep_amplitude: bool = False) -> tuple[Tensor, Tensor]:
        """Query and key before the rotation: the projections' outputs, after QK-norm if there is one."""
        if self.rotary is None:
            return self.query, self.key
        return tuple(self.rotary.unrotate(x, keep_amplitude=keep_amplitude) for x in (self.query, self.key))

    def attendable(self, positions: Tensor) -> Tensor:
        """[B or 1, len(positions), T] bool: the keys that the queries at `positions` may attend."""
        if self.mask is not None:
            return self.mask[:, 0, positions]
        return (positions[:, None] >= torch.arange(self.key.shape[2], device=positions.device))[None]


LayerCallback = Callable[[LayerAttention], tuple[Tensor, Tensor] | None]


@contextmanager
def probe_attention(model: PreTrainedModel, on_layer: LayerCallback) -> Iterator[None]:
    """Inside the context every forward pass of `model` calls `on_layer` once for each attention layer.

    The callback may return (query [B, H, T, D], key [B, H or K, T, D]) to attend with instead; with None the forward
    pass is that of sdpa. Run without a cache: `model(input_ids, use_cache=False)`.

    Raises:
        SourceError: on entering, if the model does not use transformers' attention interface; in the forward pass, if
            it has no rotary embedding, or a rotary layout, mask or attention that the probe does not know.
    """
    name = type(model).__name__
    implementation = model.config._attn_implementation
    if implementation == IMPLEMENTATION:
        raise SourceError(f"{name} is being probed already")
    probe = _Probe(on_layer)
    watched = [m for m in model.modules() if "position_embeddings" in inspect.signature(m.forward).parameters]
    hooks = []
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        if model.config._attn_implementation != IMPLEMENTATION:
            raise SourceError(f"{name} does not use transformers' attention interface, so it cannot be probed")
        for module in watched:
            _PROBES[module] = probe
            hooks.append(module.register_forward_pre_hook(probe.enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(probe.leave))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in watched:
            _PROBES.pop(module, None)
        if model.config._attn_implementation == IMPLEMENTATION:
            model.set_attn_implementation(implementation)


class _Probe:
    """The state of one `probe_attention` context."""

    def __init__(self, on_layer: LayerCallback) -> None:
        self.on_layer = on_layer
        self.arguments: dict[nn.Module, dict[str, Any]] = {}  # of the modules whose forward is running
        self.layouts: dict[nn.Module, RotaryLayout | None] = {}
        self.rerun: tuple[Tensor, Tensor] | None = None
        self.rerunning = False

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.arguments[module] = inspect.signature(module.forward).bind(*args, **kwargs).arguments

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        del self.arguments[module]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any):
        """The attention function's outputs [B, T, H, Dv], None."""
        if self.rerunning:
            self.rerun = query, key
            return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
        _check(module, query, key, mask, options)
        cos, sin = _per_pair(module, self.arguments[module].get("position_embeddings"))
        if module not in self.layouts:
            self.layouts[module] = _recognise(module, (query, key), self.without_rotation(module), cos, sin)
        layout = self.layouts[module]
        scaling = options.get("scaling") or query.shape[-1] ** -0.5
        softcap = options.get("softcap")
        layer = LayerAttention(
            layer_idx=module.layer_idx,
            query=query,
            key=key,
            scaling=scaling,
            softcap=softcap,
            mask=mask,
            rotary=None if layout is None else Rotary(layout, cos, sin),
        )
        replaced = self.on_layer(layer)
        if replaced is None and softcap is None:
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)
        query, key = replaced or (query, key)
        return _attention(query.to(value.dtype), key.to(value.dtype), value, mask, scaling, softcap), None

    def without_rotation(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """The query and key that `module` hands over for its present input when its rotation is the identity."""
        arguments = dict(self.arguments[module])
        cos, sin = arguments["position_embeddings"]
        arguments["position_embeddings"] = torch.ones_like(cos), torch.zeros_like(sin)
        keywords = arguments.pop("kwargs", {})
        self.rerunning = True
        try:
            module.forward(**arguments, **keywords)
        finally:
            self.rerunning = False
        vectors, self.rerun = self.rerun, None
        return vectors


_PROBES: dict[nn.Module, _Probe] = {}


def _probed_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **options: Any):
    if module not in _PROBES:
        raise SourceError(_no_rope(module))
    return _PROBES[module].attend(module, query, key, value, attention_mask, **options)


AttentionInterface.register(IMPLEMENTATION, _probed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def _no_rope(module: nn.Module) -> str:
    return (
        f"{type(module).__name__} is given no rotary position embeddings: the model has no RoPE, or applies it where"
        " the probe cannot see it"
    )


def _check(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any]) -> None:
    name = type(module).__name__
    causal = options.get("is_causal")
    if mask is None and not (getattr(module, "is_causal", True) if causal is None else causal):
        raise SourceError(f"{name} attends in both directions; head analysis is for causal attention")
    if mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1):
        raise SourceError(
            f"{name} has an attention mask of {mask.dtype} and shape {list(mask.shape)}; the probe reads boolean ones"
            " that are the same for all heads"
        )
    if query.shape[2] != key.shape[2]:
        raise SourceError(f"{name} has {query.shape[2]} queries and {key.shape[2]} keys; run it with use_cache=False")
    for option in ("s_aux", "position_bias"):
        if options.get(option) is not None:
            raise SourceError(f"{name} adds {option} to its attention, which the probe does not know")


def _per_pair(module: nn.Module, position_embeddings: Any) -> tuple[Tensor, Tensor]:
    """cos and sin [B or 1, T, F], one angle per pair, from a layer's `position_embeddings`.

    Models repeat each angle for both dimensions of its pair, as two halves or side by side, or do not repeat it.
    """
    if position_embeddings is None:
        raise SourceError(_no_rope(module))
    if not (isinstance(position_embeddings, tuple) and all(x.ndim == 3 for x in position_embeddings)):
        raise SourceError(f"{type(module).__name__} has position embeddings that are no pair of cos and sin [B, T, R]")
    cos, sin = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in position_embeddings)
    half = cos.shape[-1] // 2
    for first, second in ((slice(half), slice(half, None)), (slice(0, None, 2), slice(1, None, 2))):
        if all(torch.equal(x[..., first], x[..., second]) for x in (cos, sin)):
            return cos[..., first], sin[..., first]
    return cos, sin


def _recognise(
    module: nn.Module, rotated: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor
) -> RotaryLayout | None:
    """The layout whose rotation of the `plain` query and key gives the `rotated` ones; None if they are the same."""

    def agree(found: tuple[Tensor, ...]) -> bool:
        # A float64 model may rotate in float32.
        tolerance = 8 * max(torch.finfo(rotated[0].dtype).eps, torch.finfo(torch.float32).eps)
        return all((a - b).norm() <= tolerance * b.norm() for a, b in zip(found, rotated, strict=True))

    if agree(plain):
        return None
    head_dim, pairs = plain[0].shape[-1], cos.shape[-1]
    if 2 * pairs <= head_dim:
        index = torch.arange(2 * pairs, device=cos.device)
        for offset in (0, head_dim - 2 * pairs):
            layouts = {"half-split": index.view(2, pairs).T, "interleaved": index.view(pairs, 2)}
            for name, dimensions in layouts.items():
                layout = RotaryLayout(name, dimensions + offset)
                if agree(tuple(Rotary(layout, cos, sin).rotate(x) for x in plain)):
                    return layout
    raise SourceError(
        f"layer {module.layer_idx} ({type(module).__name__}) rotates its {head_dim} dimensions in a way that is neither"
        f" half-split nor interleaved with {pairs} pairs; such a model cannot be analysed"
    )


def _attention(query: Tensor, key: Tensor, value: Tensor, mask, scaling: float, softcap: float | None) -> Tensor:
    """[B, T, H, Dv]: softmax attention with soft-capped logits, or with a key per query head, which sdpa lacks here."""
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    if softcap is None:
        output = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, is_causal=mask is None)
    else:
        if mask is None:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        logits = softcap * torch.tanh(query @ key.mT * (scaling / softcap))
        weights = logits.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=torch.float32)
        output = weights.to(value.dtype) @ value
    return output.transpose(1, 2).contiguous()
