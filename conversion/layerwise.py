"""Walks a source model and its hybrid through text together, one layer at a time.

Healing a converted model is a regression per layer: given what comes into the source's layer, give what the source's
attention gave. Both models are HwH models (the source in exact form), so one piece of code runs every family. Only the
hidden states of one depth are held, never all of them: memory grows with the text, not with the depth.
"""

from collections.abc import Callable, Iterator
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

    def _context(self, rows: Tensor) -> dict:
        positions = torch.arange(rows.shape[1], device=rows.device)[None]
        rotary = self.model.model.rotary_emb
        return {
            "attention_masks": build_attention_masks(self.model.config, rows, None),
            "layout": SequenceLayout(),
            "position_embeddings": None if rotary is None else rotary(rows, positions),
            "position_ids": positions,
        }


@dataclass
class Rows:
    """Token rows of one length on their way through the source.

    Attributes:
        tokens: `[S, T]`.
        hidden: `[S, T, hidden]`, the source's hidden states at the walk's depth.
        inputs: `[S, T, hidden]`, what comes into the mixer at this depth.
        targets: `[S, T, hidden]`, what the source's mixer makes of it.
    """

    tokens: Tensor
    hidden: Tensor = field(init=False)
    inputs: Tensor = field(init=False)
    targets: Tensor = field(init=False)


def batched(function: Callable[[Tensor], Tensor], rows: Tensor, batch_tokens: int = 4096) -> Tensor:
    """Applies `function` to `rows` `[S, T, ...]` a few rows at a time and joins the results."""
    return torch.cat([function(part) for part in rows.split(max(1, batch_tokens // rows.shape[1]))])


@torch.no_grad()
def walk_layers(source: HwHForCausalLM, groups: list[Tensor]) -> Iterator[tuple[int, list[Rows]]]:
    """Yields each layer with what comes into the source's mixer and what comes out of it.

    Args:
        source: the source model in exact HwH form.
        groups: token rows `[S, T]`, one tensor per length.
    """
    runner = LayerRunner(source)
    walkers = [Rows(tokens) for tokens in groups]
    for rows in walkers:
        rows.hidden = runner.embed(rows.tokens)
    for layer in range(source.config.num_hidden_layers):
        for rows in walkers:
            rows.inputs = batched(lambda part, layer=layer: runner.norm(layer, part), rows.hidden)
            rows.targets = batched(lambda part, layer=layer: runner.mixer(layer, part), rows.inputs)
        yield layer, walkers
        for rows in walkers:
            rows.hidden = batched(lambda part, layer=layer: runner.add_mlp(layer, part), rows.hidden + rows.targets)
