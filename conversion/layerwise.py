"""Walks a source model and its hybrid through text together, one layer at a time.

Healing a converted model is a regression per layer: given what comes into the layer, give what the source's attention
gave. Both models are HwH models (the source in exact form), so one piece of code runs every family. Only the hidden
states of one depth are held, never all of them: memory grows with the text, not with the depth.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_hybrid import HwHForCausalLM
from hf_hybrid.decoder import build_attention_masks
from hf_hybrid.sequence_layout import SequenceLayout


@dataclass
class LayerRunner:
    """Runs the parts of a model's layers on rows `[S, T, hidden]` that are neither padded nor packed."""

    model: HwHForCausalLM

    def embed(self, tokens: Tensor) -> Tensor:
        """`[S, T]` -> `[S, T, hidden]`, what comes into the first layer."""
        return self.model.model.embed_tokens(tokens)

    def _context(self, rows: Tensor) -> dict:
        positions = torch.arange(rows.shape[1], device=rows.device)[None]
        rotary = self.model.model.rotary_emb
        return {
            "attention_masks": build_attention_masks(self.model.config, rows, None),
            "layout": SequenceLayout(),
            "position_embeddings": None if rotary is None else rotary(rows, positions),
            "position_ids": positions,
        }

    def norm(self, layer: int, hidden: Tensor) -> Tensor:
        """What comes into the layer's mixer."""
        return self.model.model.layers[layer].input_layernorm(hidden)

    def heads(self, layer: int, inputs: Tensor) -> Tensor:
        """The mixer's heads before the output projection, of normed `inputs`."""
        return self.model.model.layers[layer].token_mixer.mix_heads(inputs, **self._context(inputs))

    def mixer(self, layer: int, inputs: Tensor) -> Tensor:
        """The mixer's output, of normed `inputs`."""
        return self.model.model.layers[layer].token_mixer(inputs, **self._context(inputs))

    def add_mlp(self, layer: int, hidden: Tensor) -> Tensor:
        """The layer's second half, `hidden` being what the mixer's output was added to."""
        block = self.model.model.layers[layer]
        return hidden + block.mlp(block.post_attention_layernorm(hidden))


@dataclass
class Rows:
    """Rows of one length on their way through both models.

    Attributes:
        tokens: `[S, T]`.
        source: `[S, T, hidden]`, the source's hidden states at the walk's depth.
        hybrid: the same of the hybrid; None when the hybrid is fed the source's.
        inputs: `[S, T, hidden]`, what comes into the hybrid's mixer at this depth.
        targets: `[S, T, hidden]`, what should come out of it.
    """

    tokens: Tensor
    source: Tensor = field(init=False)
    hybrid: Tensor | None = field(init=False, default=None)
    inputs: Tensor = field(init=False)
    targets: Tensor = field(init=False)


def batched(function, rows: Tensor, batch_tokens: int = 4096) -> Tensor:
    """Applies `function` to `rows` `[S, T, ...]` a few rows at a time and joins the results."""
    size = max(1, batch_tokens // rows.shape[1])
    return torch.cat([function(part) for part in rows.split(size)])


@torch.no_grad()
def walk_layers(
    source: HwHForCausalLM, hybrid: HwHForCausalLM, groups: list[Tensor], *, follow: str
) -> Iterator[tuple[int, list[Rows]]]:
    """Yields each layer with the inputs and targets of its mixer; the caller fits the hybrid's mixer in between.

    Args:
        source: the source model in exact HwH form.
        hybrid: the model to heal; its mixers may be changed at each stop.
        groups: token rows `[S, T]`, one tensor per length.
        follow: `"source"`: inputs and targets are the source's own. `"hybrid"`: inputs are what the hybrid's earlier
            layers really give, and the target is what brings its residual stream back to the source's, so that a layer
            makes up for the errors of those before it.
    """
    teacher, student = LayerRunner(source), LayerRunner(hybrid)
    rows = [Rows(tokens) for tokens in groups]
    for group in rows:
        group.source = teacher.embed(group.tokens)
        group.hybrid = group.source.clone() if follow != "source" else None
    for layer in range(source.config.num_hidden_layers):
        for group in rows:
            inputs = batched(lambda part, layer=layer: teacher.norm(layer, part), group.source)
            output = batched(lambda part, layer=layer: teacher.mixer(layer, part), inputs)
            group.source = group.source + output
            if follow != "source":
                group.inputs = batched(lambda part, layer=layer: student.norm(layer, part), group.hybrid)
                group.targets = output if follow == "mixed" else group.source - group.hybrid
            else:
                group.inputs, group.targets = inputs, output
        yield layer, rows
        for group in rows:
            if follow != "source":
                output = batched(lambda part, layer=layer: student.mixer(layer, part), group.inputs)
                group.hybrid = batched(
                    lambda part, layer=layer: student.add_mlp(layer, part), group.hybrid + output
                )
            group.source = batched(lambda part, layer=layer: teacher.add_mlp(layer, part), group.source)
