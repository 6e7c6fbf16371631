"""How much each layer's MLP repeats the residual stream: the observation behind tapered widths (arXiv 2606.23670).

There, the cosine between what an MLP adds and the stream that it adds it to grows with depth: late MLPs amplify what is
there already, and can do with less width. [`mlp_alignment`] measures it for any decoder of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_hybrid.conversion.picture_page import BLUE, Picture
from hf_hybrid.conversion.source_model import SourceError

# What architectures call a layer's MLP; where a norm follows it, the norm's output is what is added.
MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
NORM_AFTER_MLP = ("post_feedforward_layernorm",)


@dataclass(frozen=True)
class MLPAlignment:
    """Cosines between MLP output and residual stream, one value a layer.

    Attributes:
        cosine: `[L]`, mean over tokens.
        relative_norm: `[L]`, norm of the MLP's output over that of the stream, mean over tokens.
    """

    cosine: Tensor
    relative_norm: Tensor

    @property
    def depth_correlation(self) -> float:
        """Pearson's correlation of the cosine with depth; needs 2 layers or more, NaN otherwise."""
        if len(self.cosine) < 2:
            return float("nan")
        depth = torch.arange(len(self.cosine), dtype=self.cosine.dtype)
        return torch.corrcoef(torch.stack([depth, self.cosine]))[0, 1].item()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a decoder, first to last. Raises `SourceError` if it has no list of them."""
    # A looped model's text configuration counts the applications of its layers.
    text_config = model.config.get_text_config(decoder=True)
    depths = {text_config.num_hidden_layers, getattr(model.config, "num_hidden_layers", None)}
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) in depths and _mlp(module[0]) is not None:
            return list(module)
    raise SourceError(
        f"{type(model).__name__} has no list of {text_config.num_hidden_layers} layers with an MLP (one of "
        f"{', '.join(MLP_NAMES)}): its MLPs can't be told from the rest"
    )


@torch.no_grad()
def mlp_alignment(
    model: PreTrainedModel, input_ids: Tensor, *, progress: Callable[[int, int], None] | None = None
) -> MLPAlignment:
    """Cosine of MLP output and residual stream in every layer.

    The stream is the layer's output less what the MLP added, so that sequential and parallel layers count alike. First
    tokens, which carry attention sinks of another magnitude, are left out.

    Args:
        model: any causal language model or decoder of transformers.
        input_ids: `[W, T]`, windows of at least 2 tokens, read one at a time.
        progress: called with windows done and windows in all.
    """
    layers = decoder_layers(model)
    if input_ids.shape[1] < 2:
        raise SourceError(f"windows of {input_ids.shape[1]} tokens: first tokens are left out, give at least 2")
    # Sums of both figures over tokens, and the tokens: a looped model applies a layer more than once.
    sums = torch.zeros(3, len(layers), dtype=torch.float64)
    added: dict[int, Tensor] = {}

    def keep(index: int):
        def hook(module, args, output):
            added[index] = _states(output)

        return hook

    def measure(index: int):
        def hook(module, args, output):
            mlp = added.pop(index)[:, 1:].double()
            stream = _states(output)[:, 1:].double() - mlp
            cosine = nn.functional.cosine_similarity(mlp, stream, dim=-1)
            norms = mlp.norm(dim=-1) / stream.norm(dim=-1).clamp(min=1e-12)
            sums[:, index] += torch.stack([cosine.sum(), norms.sum(), torch.ones_like(norms).sum()]).cpu()

        return hook

    handles = []
    try:
        for index, layer in enumerate(layers):
            handles.append(_mlp(layer).register_forward_hook(keep(index)))
            handles.append(layer.register_forward_hook(measure(index)))
        for done, window in enumerate(input_ids, start=1):
            model(input_ids=window[None].to(model.device), use_cache=False)
            if progress is not None:
                progress(done, len(input_ids))
    finally:
        for handle in handles:
            handle.remove()
    cosine, relative_norm = sums[:2] / sums[2]
    return MLPAlignment(cosine, relative_norm)


def draw(alignment: MLPAlignment, name: str) -> Picture:
    """The figure: cosine and relative norm of each layer's MLP output over depth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    layers = range(len(alignment.cosine))
    for axes, values, label in (
        (left, alignment.cosine, "cosine of MLP output and residual"),
        (right, alignment.relative_norm, "norm of MLP output over residual"),
    ):
        axes.plot(layers, values, color=BLUE, marker="o", markersize=3)
        axes.set_xlabel("layer")
        axes.set_ylabel(label)
    left.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    right.set_yscale("log")
    caption = (
        f"What each MLP of {name} adds, against the residual stream that it adds it to; means over tokens, first "
        f"tokens left out. Correlation of the cosine with depth: {alignment.depth_correlation:.2f}."
    )
    return Picture("depth_asymmetry", "MLP output and residual stream over depth", caption, figure)


def _mlp(layer: nn.Module) -> nn.Module | None:
    """What adds the MLP's output to the stream: the MLP, or the norm that follows it."""
    for name in (*NORM_AFTER_MLP, *MLP_NAMES):
        if (module := getattr(layer, name, None)) is not None:
            return module
    return None


def _states(output) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
