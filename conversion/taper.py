"""A uniform checkpoint becomes a tapered one (arXiv 2606.23670): late MLPs lose neurons, early ones gain some.

Neurons that add the least to the residual stream go. New ones have a random input side and a zero output side: they
leave the function as it is, and get a gradient from the first step of training on. The conversion is our definition;
the paper trains from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_hybrid.configuration_decoder import DecoderConfig
from hf_hybrid.conversion.convert import convert
from hf_hybrid.conversion.source_model import SourceError, load_complete
from hf_hybrid.decoder import GatedMLP, PlainMLP
from hf_hybrid.width_taper import tapered_widths


@contextmanager
def open_zoo_model(
    model: str | Path, *, gguf_file: str | None = None, revision: str | None = None
) -> Iterator[tuple[PreTrainedModel, Path]]:
    """A model of the zoo in float32, and its folder: MODEL itself, or a RoPE checkpoint in exact HwH form.

    Raises:
        SourceError: it is incomplete, or its MLPs differ in width already.
        ValueError: it is neither a model of the zoo nor one that can be converted.
    """
    with TemporaryDirectory() as temporary:
        folder = Path(model)
        if not _is_zoo_folder(folder):
            folder = Path(temporary) / "exact"
            convert(model, folder, exact=True, gguf_file=gguf_file, revision=revision)
        loaded = load_complete(AutoModelForCausalLM, model, folder, dtype=torch.float32).eval()
        if loaded.config.is_heterogeneous:
            raise SourceError(f"{model} has MLPs of several widths already: give a model with one intermediate_size")
        for layer, mlp in enumerate(_mlps(loaded)):
            if not isinstance(mlp, (GatedMLP, PlainMLP)):
                raise SourceError(
                    f"layer {layer} of {model} has a {type(mlp).__name__} in place of an MLP, whose width has no taper"
                )
        yield loaded, folder


@torch.no_grad()
def neuron_importance(
    model: PreTrainedModel, sequences: Tensor, *, progress: Callable[[int, int], None] | None = None
) -> list[Tensor]:
    """Mean energy that each neuron adds to the residual stream: E[activation^2] times its squared output weights.

    Args:
        model: of the zoo, with a gated MLP in every layer.
        sequences: `[S, T]` tokens, read a row at a time; first tokens, which carry attention sinks, are left out.
        progress: called with rows done and rows in all.

    Returns:
        Per layer `[intermediate_size]`, in float32.
    """
    mlps = _mlps(model)
    energy = [torch.zeros(mlp.down_proj.in_features, dtype=torch.float64) for mlp in mlps]

    def add(layer: int):
        def hook(module, args):
            energy[layer] += args[0][:, 1:].double().pow(2).sum((0, 1)).cpu()

        return hook

    handles = [mlp.down_proj.register_forward_pre_hook(add(layer)) for layer, mlp in enumerate(mlps)]
    try:
        for done, row in enumerate(sequences, start=1):
            model(input_ids=row[None], use_cache=False, logits_to_keep=1)
            if progress is not None:
                progress(done, len(sequences))
    finally:
        for handle in handles:
            handle.remove()
    tokens = sequences.shape[0] * (sequences.shape[1] - 1)
    return [
        (total / tokens * mlp.down_proj.weight.double().pow(2).sum(0)).float()
        for total, mlp in zip(energy, mlps, strict=True)
    ]


@torch.no_grad()
def taper(
    model: PreTrainedModel,
    importance: list[Tensor] | None,
    *,
    mlp_taper: dict | None = None,
    grow_only: bool = False,
    seed: int = 0,
) -> list[int]:
    """Changes the MLPs of `model` to the widths of a taper, in place.

    Args:
        model: of the zoo, uniform, with a gated MLP in every layer.
        importance: of `neuron_importance`; not needed with `grow_only`.
        mlp_taper: fields of [`tapered_widths`]; the ones left out at their defaults.
        grow_only: no layer loses a neuron, so the function stays as it is and the model grows.
        seed: of the new neurons' input weights, which are drawn as the model draws its own.

    Returns:
        The new widths.

    Raises:
        ValueError: the taper does not fit the model's sizes.
    """
    config = model.config
    size = config.intermediate_size
    mlp_taper = dict(mlp_taper or {})
    widths = tapered_widths(config.num_hidden_layers, size, **mlp_taper)
    if grow_only:
        widths = [max(width, size) for width in widths]
    generator = torch.Generator().manual_seed(seed)
    for layer, (mlp, width) in enumerate(zip(_mlps(model), widths, strict=True)):
        if width < size:
            # The kept ones stay in order.
            _keep_neurons(mlp, importance[layer].topk(width).indices.sort().values)
        elif width > size:
            _add_neurons(mlp, width - size, config.initializer_range, generator)
    if grow_only:
        config.per_layer_config = {layer: {"intermediate_size": width} for layer, width in enumerate(widths)}
    else:
        config.mlp_taper = mlp_taper
        config.per_layer_config = {layer: {"intermediate_size": width} for layer, width in enumerate(widths)}
    return widths


def _is_zoo_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file() and isinstance(AutoConfig.from_pretrained(folder), DecoderConfig)


def _mlps(model: PreTrainedModel) -> list[nn.Module]:
    return [layer.mlp for layer in model.model.layers]


def _inputs(mlp: GatedMLP | PlainMLP) -> list[nn.Linear]:
    """The input side of the neurons."""
    return [mlp.gate_proj, mlp.up_proj] if isinstance(mlp, GatedMLP) else [mlp.up_proj]


def _keep_neurons(mlp: GatedMLP | PlainMLP, kept: Tensor) -> None:
    for projection in _inputs(mlp):
        _set(projection, projection.weight[kept], None if projection.bias is None else projection.bias[kept])
    _set(mlp.down_proj, mlp.down_proj.weight[:, kept], mlp.down_proj.bias)


def _add_neurons(mlp: GatedMLP | PlainMLP, count: int, std: float, generator: torch.Generator) -> None:
    for projection in _inputs(mlp):
        drawn = torch.randn(count, projection.in_features, generator=generator).to(projection.weight) * std
        bias = None if projection.bias is None else torch.cat([projection.bias, projection.bias.new_zeros(count)])
        _set(projection, torch.cat([projection.weight, drawn]), bias)
    weight = mlp.down_proj.weight
    _set(mlp.down_proj, torch.cat([weight, weight.new_zeros(weight.shape[0], count)], dim=1), mlp.down_proj.bias)


def _set(projection: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    projection.weight = nn.Parameter(weight.clone())
    projection.bias = None if bias is None else nn.Parameter(bias.clone())
    projection.out_features, projection.in_features = weight.shape
