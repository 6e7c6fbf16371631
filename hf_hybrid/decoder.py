"""The chassis that every family stands on: pre-norm decoder layers around any token mixer.

A family gives the mixer of each layer ([`DecoderModel.build_token_mixer`]) and its configuration; embeddings, masks,
cache, rotary angles, MLP, norms and heads are the same for all.
"""

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import (
    and_masks,
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import RMSNorm, RotaryEmbedding, SoftmaxAttention
from .gated_delta_net import GatedDeltaNet, LogDecay
from .sequence_layout import (
    SequenceLayout,
    check_shapes,
    default_position_ids,
    has_inner_padding,
    lay_out,
    read_documents,
    read_padding,
    real_token_window,
)


class GatedMLP(nn.Module):
    """Gated linear unit (arXiv 2002.05202): down(act(gate x) * up x)."""

    def __init__(self, config, width: int | None = None):
        super().__init__()
        width = config.intermediate_size if width is None else width
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` -> `[..., hidden]`."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class PlainMLP(nn.Module):
    """down(act(up x)): no gate, two matrices in place of three."""

    def __init__(self, config, width: int | None = None):
        super().__init__()
        width = config.intermediate_size if width is None else width
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` -> `[..., hidden]`."""
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


def build_mlp(config, width: int | None = None) -> nn.Module:
    """The configuration's kind of MLP, `intermediate_size` wide unless told otherwise."""
    return (GatedMLP if config.mlp_gated else PlainMLP)(config, width)


class DecoderLayer(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)). The MLP's width is the layer's own."""

    def __init__(self, config, layer_idx: int, token_mixer: nn.Module, mlp: nn.Module | None = None):
        super().__init__()
        self.token_mixer = token_mixer
        self.mlp = build_mlp(config.per_layer_config[layer_idx]) if mlp is None else mlp
        norm = (config.hidden_size, config.rms_norm_eps, config.norm_weights)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(*norm), RMSNorm(*norm)
        if config.zero_init_outputs:
            # Told to the maps themselves: transformers initialises only modules with parameters of their own.
            token_mixer.o_proj.starts_at_zero = self.mlp.down_proj.starts_at_zero = True

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """`[B, T, hidden]` -> `[B, T, hidden]`; `kwargs` are the mixer's."""
        hidden_states = hidden_states + self.token_mixer(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def build_attention_masks(
    config,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None = None,
    position_ids: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    **kwargs,
) -> dict[str, torch.Tensor | None]:
    """One mask per kind of layer that the configuration has.

    Args:
        config: the model's configuration.
        inputs_embeds: `[B, T, ...]`, for sizes, dtype and device.
        attention_mask: `[B, past + T]` padding mask, or None.
        cache: the model's cache, or None.
        position_ids: unused; packed rows come as `document_ids`.
        document_ids: `[B, T]` document numbers of packed rows, or None.

    Returns:
        `"full_attention"` and `"sliding_attention"`: what the attention implementation takes;
        `"linear_attention"`: `[B, T]`, True at real tokens, None when nothing is padded.

    Raises:
        ValueError: padding between real tokens where a window must be counted over it: in a cache, which keeps places
            and not tokens, or by flash attention, which takes no mask.
    """
    masks = {"linear_attention": read_padding(attention_mask, inputs_embeds.shape[1])}
    arguments = {
        "config": config,
        "inputs_embeds": inputs_embeds,
        "attention_mask": attention_mask,
        "cache": cache,
        "and_mask_function": None if document_ids is None else packed_sequence_mask_function(document_ids),
    }
    if config.has_global_attention:
        masks["full_attention"] = create_causal_mask(**arguments)
    if config.has_sliding_attention:
        if not has_inner_padding(attention_mask):
            masks["sliding_attention"] = create_sliding_window_causal_mask(**arguments)
        elif cache is None and "flash" not in (config._attn_implementation or ""):
            window = real_token_window(attention_mask, config.sliding_window)
            others = [] if document_ids is None else [packed_sequence_mask_function(document_ids)]
            arguments["and_mask_function"] = and_masks(window, *others)
            masks["sliding_attention"] = create_causal_mask(**arguments)
        else:
            raise ValueError(
                "attention_mask has padding between real tokens, and a sliding window is counted over places in a "
                "cache and in flash attention: put the padding on the left, or pass the whole rows without a cache and "
                "with attn_implementation='sdpa'"
            )
    return masks


class DecoderPreTrainedModel(PreTrainedModel):
    """What transformers must know of the zoo's models: initialisation, precision, splitting, recording."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # A recurrent state can't be rolled back, so assisted decoding must be refused.
    _is_stateful = True
    _keep_in_fp32_modules_strict = ["decay"]
    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": SoftmaxAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, LogDecay):
            module.reset_parameters()
        elif isinstance(module, (SoftmaxAttention, GatedDeltaNet)) and module.head_scale is not None:
            init.ones_(module.head_scale)
        elif getattr(module, "starts_at_zero", False):
            init.zeros_(module.weight)

    @staticmethod
    def create_masks_for_generate(**kwargs) -> dict[str, torch.Tensor | None]:
        """The masks of one step, made by `generate` outside of the compiled forward pass."""
        return build_attention_masks(**kwargs)


class DecoderModel(DecoderPreTrainedModel):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_width, config.pad_token_id)
        self.layers = nn.ModuleList(self.build_layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_weights)
        self.rotary_emb = RotaryEmbedding(config) if config.uses_rotary_positions else None
        self.gradient_checkpointing = False
        self.post_init()

    def build_layer(self, config, layer_idx: int) -> nn.Module:
        """One layer, of the family's mixer and MLP."""
        mixer, mlp = self.build_token_mixer(config, layer_idx), self.build_mlp(config, layer_idx)
        return DecoderLayer(config, layer_idx, mixer, mlp)

    def build_token_mixer(self, config, layer_idx: int) -> nn.Module:
        """The mixer of one layer; each family gives its own."""
        raise NotImplementedError(f"{type(self).__name__} must say which mixer layer {layer_idx} has")

    def build_mlp(self, config, layer_idx: int) -> nn.Module | None:
        """What stands in the place of one layer's MLP; None = the ordinary one."""
        return None

    def embed_inputs(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """`[B, T, width]` of the tokens, or as given. Raises `ValueError` for both, neither, or another shape."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give input_ids or inputs_embeds, one of the two")
        if inputs_embeds is not None:
            return inputs_embeds
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids have shape {list(input_ids.shape)}: give [batch, tokens]")
        return self.embed_tokens(input_ids)

    def run_layers(self, hidden_states: torch.Tensor, cache: Cache | None, **kwargs) -> torch.Tensor:
        """`[B, T, hidden]` -> `[B, T, hidden]`, before the final norm: each layer once, in their order.

        `kwargs` are what [`DecoderLayer.forward`] takes, and those of [`DecoderModel.forward`] that it does not name.
        """
        for layer in self.layers:
            hidden_states = layer(hidden_states, cache=cache, **kwargs)
        return hidden_states

    def _read_layout(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | dict | None,
        position_ids: torch.Tensor | None,
        cache: Cache | None,
        cu_seq_lens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | None], SequenceLayout]:
        """Positions, masks and layout of one pass. Raises `ValueError` for packed rows that can't be kept apart."""
        batch_size, length = inputs_embeds.shape[:2]
        is_recurrent = not set(self.config.layer_types) <= {"full_attention", "sliding_attention"}
        check_shapes(
            batch_size,
            length,
            None if isinstance(attention_mask, dict) else attention_mask,
            position_ids,
            has_past=cache is not None,
            is_recurrent=is_recurrent,
        )
        if is_recurrent and cache is not None and getattr(cache, "layer_class_to_replicate", None) is not None:
            raise ValueError(
                "the cache was made without a configuration, so it has no place for recurrent states: give "
                "DynamicCache(config=model.config)"
            )
        # `generate` makes the masks itself when the forward pass is compiled; the rows are then never packed.
        masks, padding = (attention_mask, None) if isinstance(attention_mask, dict) else (None, attention_mask)
        documents = None
        if masks is None and not (cache is not None and torch.compiler.is_compiling()):
            documents = read_documents(position_ids, read_padding(padding, length), cu_seq_lens, batch_size, length)
        if documents is not None and cache is not None:
            raise ValueError(
                "position_ids or cu_seq_lens name several documents in a row, but a cache was given: "
                "packed documents can't be continued, pass cache=None"
            )
        if documents is not None and padding is not None and "flash" in (self.config._attn_implementation or ""):
            raise ValueError(
                "flash attention can't keep packed documents apart in padded rows: drop attention_mask, or load the "
                "model with attn_implementation='sdpa'"
            )
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = default_position_ids(padding, documents, past, length, inputs_embeds.device)
        if masks is None:
            masks = build_attention_masks(self.config, inputs_embeds, padding, cache=cache, document_ids=documents)
        return position_ids, masks, lay_out(masks["linear_attention"], documents)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Hidden states `[B, T, hidden]` of `input_ids` `[B, T]`.

        Args:
            input_ids: `[B, T]`; or `inputs_embeds` `[B, T, hidden]` in their place.
            attention_mask: `[B, past + T]`, nonzero = real; padding may stand anywhere in a row.
            position_ids: `[B or 1, T]`. Without a cache, a position that does not go on from the one before it starts a
                new document of a packed row. Default: counted over the real tokens.
            cache: a transformers cache to continue, dynamic or static.
            use_cache: whether to make a cache when none is given. A packed row gets none: it can't be continued.
            kwargs: `cu_seq_lens_q` `[N + 1]` names the documents of one flattened row; the rest goes to the attention
                function.
        """
        inputs_embeds = self.embed_inputs(input_ids, inputs_embeds)

        position_ids, masks, layout = self._read_layout(
            inputs_embeds, attention_mask, position_ids, cache, kwargs.get("cu_seq_lens_q")
        )
        if use_cache and cache is None and layout.document_ids is None:
            cache = DynamicCache(config=self.config)

        position_embeddings = None if self.rotary_emb is None else self.rotary_emb(inputs_embeds, position_ids)
        hidden_states = self.run_layers(
            inputs_embeds,
            attention_masks=masks,
            layout=layout,
            position_embeddings=position_embeddings,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            **kwargs,
        )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)


class DecoderForCausalLM(DecoderPreTrainedModel, GenerationMixin):
    """A decoder with a language-model head; each family sets `decoder_class`."""

    decoder_class: type[DecoderModel]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.embedding_width, config.vocab_size, bias=False)
        self.post_init()

    def backbone_inputs(self, logits_to_keep: int | torch.Tensor) -> dict:
        """What else a family's decoder must know of the positions whose logits are kept."""
        return {}

    def read_out(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """`[B, T, hidden]` -> logits `[B, T, vocab]`; `kwargs` are those of the forward pass."""
        return self.lm_head(hidden_states)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, vocab]`, and the next-token loss in nats when `labels` `[B, T]` are given.

        The other arguments are those of [`DecoderModel.forward`]; `logits_to_keep` keeps the last positions' logits
        (0 = all) or those of the given indices.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **self.backbone_inputs(logits_to_keep),
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.read_out(outputs.last_hidden_state[:, kept], **kwargs)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# The heads' own `__init__` looks the decoder up by AutoModel, where code loaded from a folder isn't registered.
# Their losses are means that know nothing of `num_items_in_batch`, so the Trainer must divide by the accumulated steps.
class DecoderForSequenceClassification(GenericForSequenceClassification, DecoderPreTrainedModel):
    """A decoder with a classification head on the last token that isn't padding; each family sets `decoder_class`."""

    decoder_class: type[DecoderModel]
    accepts_loss_kwargs = False

    def __init__(self, config):
        DecoderPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = self.decoder_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class DecoderForTokenClassification(GenericForTokenClassification, DecoderPreTrainedModel):
    """A decoder with a classification head on every token; each family sets `decoder_class`."""

    decoder_class: type[DecoderModel]
    accepts_loss_kwargs = False

    def __init__(self, config):
        DecoderPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = self.decoder_class(config)
        self.dropout = nn.Dropout(getattr(config, "classifier_dropout", 0.1))
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()
