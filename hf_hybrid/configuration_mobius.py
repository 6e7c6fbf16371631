"""Configuration of the Mobius family: decoders whose block groups are applied in a cyclic or a looped order."""

import copy

from huggingface_hub.dataclasses import strict

from .configuration_decoder import hub_classes
from .configuration_hwh import HwHConfig
from .validators import validate_at_least, validate_choice

DEPTH_ORDERS = ("cyclic", "looped", "layer_loop", "sequential")

_GPT2_SMALL = {
    "vocab_size": 50304,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_block_groups": 4,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
# `modded-gpt2` is the block that the paper's loss table was measured with, as far as it is known: KellerJordan's
# modded-nanogpt of October 2024, whose version the paper does not name.
MOBIUS_SIZES = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_block_groups": 2,
    },
    "124m": {**_GPT2_SMALL, "intermediate_size": 2048, "num_attention_heads": 12},
    "modded-gpt2": {
        **_GPT2_SMALL,
        "intermediate_size": 3072,
        "num_attention_heads": 6,
        "hidden_act": "relu2",
        "mlp_gated": False,
        "norm_weights": False,
        "qk_norm": True,
        "zero_init_outputs": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


@strict
class MobiusConfig(HwHConfig):
    r"""
    Cyclic depth folding (Mobius learning, arXiv 2607.17843), and the looped Transformers that it is compared with.

    The `num_hidden_layers` layers are cut into P = `num_block_groups` groups of equal size. A sequence that starts at
    group s runs through the groups s, s + 1, ... modulo P, and makes `passes` full turns: step k uses group
    (s + k) mod P. Over the start groups each group takes every depth.

    `passes` may be another one when a model is loaded, `from_pretrained(folder, passes=6)`, or any time after. It is no
    shape of the weights. A cache has a slot for each application of a layer, so it belongs to one `passes`, and its
    rows belong to the start groups that they were begun with.

    Args:
        num_block_groups (`int`): P; divides `num_hidden_layers`.
        passes (`int`): how often each layer is applied.
        depth_order (`str`): `"cyclic"`; `"looped"`, the same groups from 0 to P - 1 for every sequence; `"layer_loop"`,
            each layer `passes` times in a row (arXiv 2607.16051); `"sequential"`, the ordinary decoder, one pass.
        start_group (`int`): where sequences start for which the caller names no group; 0 unless the order is cyclic.
        stream_embeddings (`bool`): an embedding and a head for each start group, side by side in one matrix
            `[vocab, P * hidden]`, in place of one for all.
        input_injection (`bool`): the embeddings are added again before each pass after the first.
        pass_norm (`bool`): an RMS norm before each pass after the first, the same one for all of them.
        full_attention_heads (`list[list[int]]`, *optional*): the softmax heads of each layer, the others are Gated
            DeltaNet; `None` = every head is softmax attention. In a cyclic order layers at the same place in their
            groups must keep the same kinds and numbers of heads in the cache.
        full_attention_rope (`bool` or `list[bool]`): rotary positions on the softmax heads, per layer.
        kwargs: everything of [`HwHConfig`]: any of its mixers, windows and MLP widths work inside the groups.
    """

    model_type = "mobius"
    family_auto_map = hub_classes("mobius", "Mobius")

    num_block_groups: int = 4
    passes: int = 1
    depth_order: str = "cyclic"
    start_group: int = 0
    stream_embeddings: bool = False
    input_injection: bool = False
    pass_norm: bool = False
    full_attention_rope: bool | list[bool] = True

    def derive_fields(self):
        """Every head is softmax attention unless the heads are given; the rest is that of [`HwHConfig`]."""
        if self.full_attention_heads is None:
            self.full_attention_heads = [list(range(self.num_attention_heads))] * self.num_hidden_layers
        validate_at_least("num_block_groups", self.num_block_groups, 1)
        if self.num_hidden_layers % self.num_block_groups != 0:
            raise ValueError(
                f"num_block_groups is {self.num_block_groups}, num_hidden_layers {self.num_hidden_layers}: groups are "
                "of equal size, so the first must divide the second"
            )
        super().derive_fields()

    def validate_architecture(self):
        """Checks the fields against each other. Raises `ValueError` naming field and value."""
        super().validate_architecture()
        validate_choice("depth_order", self.depth_order, DEPTH_ORDERS)
        validate_at_least("passes", self.passes, 1)
        self.check_start_group(self.start_group)
        if self.depth_order == "sequential" and self.passes != 1:
            raise ValueError(f"passes is {self.passes}, depth_order 'sequential': that is one pass, or give 'looped'")
        if self.depth_order != "cyclic" and self.stream_embeddings:
            raise ValueError(
                f"stream_embeddings is True, depth_order {self.depth_order!r}: all sequences start alike, give 'cyclic'"
            )
        if self.depth_order in ("layer_loop", "sequential"):
            for field in ("input_injection", "pass_norm"):
                if getattr(self, field):
                    raise ValueError(
                        f"{field} is True, depth_order {self.depth_order!r}: there is nothing between passes, give "
                        "'cyclic' or 'looped'"
                    )
        if self.depth_order == "cyclic":
            for layer in range(self.layers_per_group, self.num_hidden_layers):
                place = layer % self.layers_per_group
                if (own := self._cached_heads(layer)) != (other := self._cached_heads(place)):
                    raise ValueError(
                        f"full_attention_heads and windows make layer {layer} cache {own}, layer {place} {other}: in "
                        "depth_order 'cyclic' they share a slot of the cache, give all groups the same"
                    )

    def check_start_group(self, group: int):
        """Raises `ValueError` unless sequences can start at `group`."""
        last = self.num_block_groups - 1 if self.depth_order == "cyclic" else 0
        if not 0 <= group <= last:
            raise ValueError(
                f"start_group is {group}: give 0 to {last}"
                + ("" if self.depth_order == "cyclic" else f", depth_order {self.depth_order!r} has one start")
            )

    def _cached_heads(self, layer: int) -> str:
        """What a layer keeps in its slot of the cache, in words."""
        heads, group_size = self.full_attention_heads[layer], self.num_attention_heads // self.num_key_value_heads
        keys = len({head // group_size for head in heads})
        return f"{self.layer_type(layer)} of {keys} key-value and {self.num_attention_heads - len(heads)} linear heads"

    @property
    def layers_per_group(self) -> int:
        """Layers of a block group."""
        return self.num_hidden_layers // self.num_block_groups

    @property
    def embedding_width(self) -> int:
        """Columns of the embedding and of the head: the streams' side by side."""
        return self.hidden_size * (self.num_block_groups if self.stream_embeddings else 1)

    @property
    def num_layer_applications(self) -> int:
        """How often layers are applied in all: the slots of a cache."""
        return self.passes * self.num_hidden_layers

    def layer_order(self, start_group: int = 0) -> list[tuple[int, int]]:
        """The applications of layers in their order: (layer, how often it was applied before). Slot n is the n-th's."""
        layers = range(self.num_hidden_layers)
        if self.depth_order == "layer_loop":
            return [(layer, visit) for layer in layers for visit in range(self.passes)]
        first = start_group * self.layers_per_group
        turn = [(first + place) % self.num_hidden_layers for place in layers]
        return [(layer, visit) for visit in range(self.passes) for layer in turn]

    def marks_positions(self, layer: int) -> bool:
        """As in [`HwHConfig`], in the first layer of every group: any group may be the first."""
        return layer % self.layers_per_group == 0 and not self.counts_positions_by_keys

    def get_text_config(self, decoder=None, encoder=None):
        """With `decoder=True`, as caches ask for it, the unrolled stack: a layer for each application of one."""
        if not decoder or encoder:
            return self
        unrolled = copy.copy(self)
        # Straight into the dictionary: fields are checked against each other only when a configuration is made.
        fields = vars(unrolled)
        fields["layer_types"] = [self.layer_types[layer] for layer, _ in self.layer_order()]
        fields["num_hidden_layers"] = self.num_layer_applications
        fields.update(depth_order="sequential", num_block_groups=1, passes=1, start_group=0)
        fields.pop("_heterogeneity_spec", None)
        return unrolled

    @classmethod
    def from_scratch(cls, size: str, **overrides) -> "MobiusConfig":
        """One of the sizes `tiny`, `124m`, `modded-gpt2`; `overrides` are fields."""
        validate_choice("size", size, MOBIUS_SIZES)
        return cls(**{**MOBIUS_SIZES[size], **overrides})


# Makes `save_pretrained` and `push_to_hub` copy the code.
MobiusConfig.register_for_auto_class()

__all__ = ["MobiusConfig"]
