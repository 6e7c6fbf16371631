"""Mobius models (arXiv 2607.17843): block groups in a cyclic order that each sequence enters at a group of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.output_capturing import OutputRecorder

from .attention import RMSNorm, SoftmaxAttention
from .cache_rows import put_rows, take_rows
from .configuration_mobius import MobiusConfig
from .decoder import (
    DecoderForCausalLM,
    DecoderForSequenceClassification,
    DecoderForTokenClassification,
    DecoderLayer,
    DecoderModel,
    DecoderPreTrainedModel,
)
from .modeling_hwh import HeadwiseHybrid


class MobiusPreTrainedModel(DecoderPreTrainedModel):
    """Ties the family's configuration to the chassis."""

    config_class = MobiusConfig
    # A state for each application of a layer.
    _can_record_outputs = {
        "hidden_states": OutputRecorder(DecoderLayer, num_hidden_layers_key="num_layer_applications"),
        "attentions": SoftmaxAttention,
    }


def read_start_groups(
    start_groups: int | torch.Tensor | None, config: MobiusConfig, batch_size: int
) -> int | torch.LongTensor:
    """The start group of all rows where they have one in common, or one for each row, `[B]`.

    Raises:
        ValueError: a group that there is not, or a tensor that does not have one for each row.
    """
    if start_groups is None:
        return config.start_group
    if isinstance(start_groups, int):
        config.check_start_group(start_groups)
        return start_groups
    if start_groups.shape != (batch_size,):
        raise ValueError(
            f"start_groups have shape {list(start_groups.shape)}, but the batch has {batch_size} rows: give one group "
            "for each row, or one number for all"
        )
    found = start_groups.unique().tolist()
    for group in found:
        config.check_start_group(group)
    return found[0] if len(found) == 1 else start_groups


class MobiusModel(MobiusPreTrainedModel, DecoderModel):
    """The Mobius decoder without a head."""

    def __init__(self, config: MobiusConfig):
        # `from_pretrained(folder, passes=6)` sets the field after the configuration has checked itself.
        config.validate_architecture()
        super().__init__(config)
        norm = (config.hidden_size, config.rms_norm_eps, config.norm_weights)
        self.pass_norm = RMSNorm(*norm) if config.pass_norm else None
        self.post_init()

    def build_token_mixer(self, config: MobiusConfig, layer_idx: int) -> HeadwiseHybrid:
        return HeadwiseHybrid(config, layer_idx)

    def block_group(self, group: int) -> nn.ModuleList:
        """The layers of block group `group`."""
        size = self.config.layers_per_group
        return self.layers[group * size : (group + 1) * size]

    def run_group(self, group: int, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """One step, `[B, T, hidden]` -> `[B, T, hidden]`; `kwargs` are those of [`DecoderLayer.forward`]."""
        for layer in self.block_group(group):
            hidden_states = layer(hidden_states, **kwargs)
        return hidden_states

    def begin_pass(self, hidden_states: torch.Tensor, inputs_embeds: torch.Tensor) -> torch.Tensor:
        """What stands before each pass after the first: norm and input injection, where the configuration has them."""
        if self.pass_norm is not None:
            hidden_states = self.pass_norm(hidden_states)
        return hidden_states + inputs_embeds if self.config.input_injection else hidden_states

    def embed(self, embeddings: torch.Tensor, start_group: int) -> torch.Tensor:
        """`[B, T, hidden]`: what sequences that start at `start_group` read of all streams' `[B, T, P * hidden]`."""
        width = self.config.hidden_size
        if not self.config.stream_embeddings or embeddings.shape[-1] == width:
            return embeddings
        return embeddings[..., start_group * width : (start_group + 1) * width]

    def _cache_of_each_visit(self, cache: Cache | None, start_group: int) -> list[Cache | None]:
        """Caches in which layer l finds the slot of its v-th application at l, where every mixer looks for it."""
        config = self.config
        if cache is None:
            return [None] * config.passes
        _make_slots(cache, config.num_layer_applications)
        views = [[None] * config.num_hidden_layers for _ in range(config.passes)]
        for slot, (layer, visit) in enumerate(config.layer_order(start_group)):
            views[visit][layer] = cache.layers[slot]
        return [Cache(layers=layers) for layers in views]

    def run_layers(
        self, hidden_states: torch.Tensor, cache: Cache | None, start_group: int = 0, **kwargs
    ) -> torch.Tensor:
        """As in [`DecoderModel.run_layers`], in the order of the configuration, from `start_group` on."""
        config, inputs_embeds = self.config, hidden_states
        views = self._cache_of_each_visit(cache, start_group)
        if config.depth_order in ("layer_loop", "sequential"):
            for layer, visit in config.layer_order():
                hidden_states = self.layers[layer](hidden_states, cache=views[visit], **kwargs)
            return hidden_states
        for visit, view in enumerate(views):
            if visit:
                hidden_states = self.begin_pass(hidden_states, inputs_embeds)
            for step in range(config.num_block_groups):
                group = (start_group + step) % config.num_block_groups
                hidden_states = self.run_group(group, hidden_states, cache=view, **kwargs)
        return hidden_states

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        start_groups: int | torch.LongTensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Hidden states `[B, T, hidden]` of `input_ids` `[B, T]`; see [`DecoderModel.forward`].

        Args:
            start_groups: the block group that the sequences start at: one for all, or `[B]` one for each row; None =
                `config.start_group`. Rows that start alike run together, the sets of rows one after the other. What a
                cache is continued with must start where the cache did.
        """
        inputs_embeds = self.embed_inputs(input_ids, inputs_embeds)
        starts = read_start_groups(start_groups, self.config, len(inputs_embeds))
        arguments = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache, **kwargs}
        if isinstance(starts, int):
            inputs_embeds = self.embed(inputs_embeds, starts)
            return super().forward(inputs_embeds=inputs_embeds, cache=cache, start_group=starts, **arguments)

        if cache is not None:
            _make_slots(cache, self.config.num_layer_applications)
        as_dictionary = arguments.pop("return_dict", True)
        groups = starts.unique().tolist()
        rows = [(starts == group).nonzero()[:, 0] for group in groups]
        outputs = []
        for group, own in zip(groups, rows, strict=True):
            take = _row_taker(own, len(starts))
            part = super().forward(
                inputs_embeds=self.embed(take(inputs_embeds), group),
                cache=None if cache is None else take_rows(cache, own),
                start_group=group,
                **{name: take(value) for name, value in arguments.items()},
            )
            outputs.append(part)
        if outputs[0].cache is not None:
            cache = DynamicCache(config=self.config) if cache is None else cache
            put_rows(cache, [output.cache for output in outputs], rows)
        order = torch.cat(rows).argsort()
        joined = {
            name: _join_rows([output[name] for output in outputs], order) for name in outputs[0] if name != "cache"
        }
        result = BaseModelOutputWithPast(**joined, cache=cache)
        return result if as_dictionary else result.to_tuple()


def _make_slots(cache: Cache, count: int) -> None:
    """Gives a cache that makes its layers as they are asked for all of them. Raises `ValueError` if one has another
    number of slots.
    """
    if cache.offloading:
        raise ValueError("an offloaded cache fetches the next layer in storage order: give one without offloading")
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) < count:
            cache.layers.append(cache.layer_class_to_replicate())
    if len(cache.layers) != count:
        raise ValueError(
            f"the cache has {len(cache.layers)} slots, but layers are applied {count} times: make it from the model's "
            "configuration, DynamicCache(config=model.config), and begin anew when passes change"
        )


def _row_taker(rows: torch.LongTensor, batch_size: int) -> Callable[[Any], Any]:
    """A function that takes `rows` of what has one for each row of the batch, and leaves the rest as it is."""

    def take(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: take(item) for name, item in value.items()}
        if isinstance(value, torch.Tensor) and value.dim() > 1 and len(value) == batch_size:
            return value.index_select(0, rows.to(value.device))
        return value

    return take


def _join_rows(pieces: list, order: torch.LongTensor) -> Any:
    """The rows of all pieces in the order of the batch; tuples of tensors one by one."""
    if isinstance(pieces[0], tuple):
        return tuple(_join_rows(list(tensors), order) for tensors in zip(*pieces, strict=True))
    return torch.cat(pieces).index_select(0, order.to(pieces[0].device))


class MobiusForCausalLM(MobiusPreTrainedModel, DecoderForCausalLM):
    """Mobius with a language-model head, or with one for each start group."""

    decoder_class = MobiusModel

    def read_out(
        self, hidden_states: torch.Tensor, start_groups: int | torch.LongTensor | None = None, **kwargs
    ) -> torch.Tensor:
        """`[B, T, hidden]` -> logits `[B, T, vocab]`, by the head of each row's stream."""
        if self.config.stream_embeddings:
            groups = self.config.start_group if start_groups is None else start_groups
            groups = torch.as_tensor(groups, device=hidden_states.device).expand(len(hidden_states))
            own = nn.functional.one_hot(groups, self.config.num_block_groups).to(hidden_states.dtype)
            # Zero but in the columns of the row's own head.
            hidden_states = (hidden_states.unsqueeze(2) * own[:, None, :, None]).flatten(2)
        return self.lm_head(hidden_states)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        start_groups: int | torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, vocab]` and loss, as [`DecoderForCausalLM.forward`]; `start_groups` as [`MobiusModel`]'s."""
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            start_groups=start_groups,
            **kwargs,
        )


class MobiusForSequenceClassification(MobiusPreTrainedModel, DecoderForSequenceClassification):
    """Mobius with a classification head on the last token."""

    decoder_class = MobiusModel


class MobiusForTokenClassification(MobiusPreTrainedModel, DecoderForTokenClassification):
    """Mobius with a classification head on every token."""

    decoder_class = MobiusModel


# Makes `save_pretrained` and `push_to_hub` copy the code and name the classes in `auto_map`.
MobiusModel.register_for_auto_class("AutoModel")
MobiusForCausalLM.register_for_auto_class("AutoModelForCausalLM")
MobiusForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
MobiusForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")

__all__ = [
    "MobiusForCausalLM",
    "MobiusForSequenceClassification",
    "MobiusForTokenClassification",
    "MobiusModel",
    "MobiusPreTrainedModel",
]
