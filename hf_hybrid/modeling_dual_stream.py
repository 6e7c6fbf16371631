"""Dual-stream models (arXiv 2607.01218): states that store and predictions that predict, inside an ordinary interface.

The two streams are kept one after the other, `[B, T + P, hidden]`: the states of all T tokens, then the predictions of
the last P. All linear maps read them in one go; attention reads them block by block, with the keys that a block can see
and no others, so its cost is that of the states' causal triangle and of a band of predictions.
"""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import RMSNorm, eager_attention, rotate
from .configuration_dual_stream import READS_STATES, DualStreamConfig
from .decoder import (
    DecoderForCausalLM,
    DecoderForSequenceClassification,
    DecoderForTokenClassification,
    DecoderModel,
    DecoderPreTrainedModel,
    build_mlp,
)
from .dual_stream_mask import may_see
from .sequence_layout import has_inner_padding

# Pairs that are read together: small enough to skip most of what they can't see, large enough for the kernels.
BLOCK = 256


class Pairs:
    """What the pairs of a batch are to the mask: real or padding, their numbers, and their documents.

    Args:
        past: pairs in the cache.
        length: T, pairs of this pass.
        padding: `[B, past + T]`, nonzero = real, or None.
        documents: `[B, T]` document numbers of packed rows, or None; without a cache.
    """

    def __init__(self, past: int, length: int, padding: torch.Tensor | None, documents: torch.Tensor | None, device):
        self.past, self.length = past, length
        self.is_real = None if padding is None else padding.bool()
        if padding is None:
            self.number = torch.arange(past + length, device=device)[None]
        else:
            self.number = self.is_real.long().cumsum(dim=1) - 1
        # Then the last places do not hold the last pairs.
        self.has_gaps = has_inner_padding(padding)
        self.documents = documents
        self._masks: dict[tuple, torch.Tensor] = {}

    def mask(
        self, config: DualStreamConfig, queries: list[tuple[range, bool]], keys: list[tuple[range, bool]]
    ) -> torch.Tensor:
        """`[B or 1, 1, queries, keys]`, True = seen, for runs of places and whether they are predictions.

        Places beyond the pairs that there are, in a static cache, are seen by none. All layers but the last ask for
        the same, which is made once.
        """
        asked = (*queries, None, *keys)
        if asked not in self._masks:
            self._masks[asked] = self._mask(config, queries, keys)
        return self._masks[asked]

    def _mask(self, config: DualStreamConfig, queries: list, keys: list) -> torch.Tensor:
        query_place, query_is_prediction = self._runs(queries)
        key_place, key_is_prediction = self._runs(keys)
        exists = key_place < self.past + self.length
        key_place = key_place.clamp(max=self.past + self.length - 1)
        seen = may_see(
            config.stream_mode,
            config.prediction_window,
            self.number[:, query_place, None],
            query_is_prediction[:, None],
            self.number[:, None, key_place],
            key_is_prediction,
        )
        seen = seen & exists
        if self.is_real is not None:
            seen = seen & self.is_real[:, None, key_place]
        if self.documents is not None:
            seen = seen & (self.documents[:, query_place, None] == self.documents[:, None, key_place])
        # A padded query may see nothing: whatever it reads is not read by anyone, but must be finite.
        return (seen | ~seen.any(dim=-1, keepdim=True)).unsqueeze(1)

    def _runs(self, runs: list[tuple[range, bool]]) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.number.device
        places = torch.cat([torch.arange(run.start, run.stop, device=device) for run, _ in runs])
        kinds = [torch.full((len(run),), kind, dtype=torch.bool, device=device) for run, kind in runs]
        return places, torch.cat(kinds)


class DualStreamAttention(nn.Module):
    """Softmax attention of both streams over both streams' keys."""

    def __init__(self, config: DualStreamConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.is_causal = False
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)
        # Told to the map itself: transformers initialises only modules with parameters of their own.
        self.o_proj.initial_spread = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
        norm = (self.head_dim, config.rms_norm_eps, config.norm_weights)
        self.q_norm = RMSNorm(*norm) if config.qk_norm else None
        self.k_norm = RMSNorm(*norm) if config.qk_norm else None

    def queries(self, hidden_states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """`[B, N, hidden]` -> `[B, H, N, D]`, rotated."""
        return self._heads(self.q_proj(hidden_states), self.q_norm, angles)

    def keys_and_values(self, hidden_states: torch.Tensor, angles) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, N, hidden]` -> two of `[B, KV, N, D]`, the keys rotated."""
        return self._heads(self.k_proj(hidden_states), self.k_norm, angles), self._heads(self.v_proj(hidden_states))

    def _heads(self, rows: torch.Tensor, norm: RMSNorm | None = None, angles=None) -> torch.Tensor:
        rows = rows.view(*rows.shape[:2], -1, self.head_dim)
        rows = rows if norm is None else norm(rows)
        return (rows if angles is None else rotate(rows, *angles)).transpose(1, 2)

    def read(self, query, key, value, mask: torch.Tensor) -> torch.Tensor:
        """Attention over one block: `[B, H, N, D]` -> `[B, N, H * D]`."""
        name = self.config._attn_implementation
        if name == "eager":
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        heads, _ = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)(
            self,
            query,
            key,
            value,
            mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            is_causal=False,
        )
        return heads.flatten(2)


class DualStreamLayer(GradientCheckpointingLayer):
    """One pre-norm block over both streams, which share its weights."""

    def __init__(self, config: DualStreamConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.is_last = layer_idx == config.num_hidden_layers - 1
        norm = (config.hidden_size, config.rms_norm_eps, config.norm_weights)
        self.token_mixer = DualStreamAttention(config, layer_idx)
        self.mlp = build_mlp(config.per_layer_config[layer_idx])
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(*norm), RMSNorm(*norm)

    def forward(
        self,
        hidden_states: torch.Tensor,
        pairs: Pairs,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """`[B, T + P, hidden]`, states then predictions -> the same, or what gives the logits after the last layer.

        Args:
            pairs: what the mask must know.
            position_embeddings: cos and sin `[B or 1, T, D]` of the pairs.
            cache: the model's cache, or None.
        """
        states = pairs.length
        predictions = hidden_states.shape[1] - states
        normed = self.input_layernorm(hidden_states)
        angles = {
            False: position_embeddings,
            True: tuple(part[:, states - predictions :] for part in position_embeddings),
        }
        streams = {False: normed[:, :states], True: normed[:, states:]}
        # The last layer's other stream is read by nobody.
        asked = [kind for kind in (False, True) if streams[kind].shape[1] and self._is_asked(kind)]
        query = {kind: self.token_mixer.queries(streams[kind], angles[kind]) for kind in asked}
        kept = self._keys(streams, angles, pairs, cache)
        attended = self._attend(query, kept, pairs, predictions)
        residual = {False: hidden_states[:, :states], True: hidden_states[:, states:]}
        hidden_states = torch.cat([residual[kind] + self.token_mixer.o_proj(attended[kind]) for kind in asked], dim=1)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    def _is_asked(self, is_prediction: bool) -> bool:
        return not self.is_last or is_prediction != (self.config.stream_mode in READS_STATES)

    def _keys(self, streams, angles, pairs: Pairs, cache: Cache | None) -> list[tuple]:
        """(is prediction, first place, keys, values) of each stream that has keys: what stays first."""
        config = self.config
        order = [False, True] if config.keeps_states else [True, False]
        found = []
        for slot, kind in enumerate(order if config.caches_predictions else [False]):
            key, value = self.token_mixer.keys_and_values(streams[kind], angles[kind])
            first = pairs.past
            if cache is not None:
                slot = 2 * self.layer_idx + slot if config.caches_predictions else self.layer_idx
                _, first = cache.get_mask_sizes(pairs.length, slot)
                key, value = cache.update(key, value, slot)
            found.append((kind, first, key, value))
        return found

    def _attend(self, query, kept, pairs: Pairs, predictions: int) -> dict[bool, torch.Tensor]:
        """What each asked stream reads, `[B, N, H * D]`, a block of pairs at a time."""
        states, pieces = pairs.length, {kind: [] for kind in query}
        begin = 0 if False in query else states - predictions
        for start in range(begin, states, BLOCK):
            stop = min(start + BLOCK, states)
            runs, rows = [], []
            for kind, heads in query.items():
                # Predictions stand for the last pairs only.
                offset = states - heads.shape[2]
                low = max(start, offset)
                if low < stop:
                    runs.append((range(pairs.past + low, pairs.past + stop), kind))
                    rows.append(heads[:, :, low - offset : stop - offset])
            key_runs, keys, values = [], [], []
            for position, (kind, first, key, value) in enumerate(kept):
                places = self._visible_places(pairs, position, first, key.shape[2], start, stop)
                key_runs.append((places, kind))
                keys.append(key[:, :, places.start - first : places.stop - first])
                values.append(value[:, :, places.start - first : places.stop - first])
            mask = pairs.mask(self.config, runs, key_runs)
            read = self.token_mixer.read(torch.cat(rows, dim=2), torch.cat(keys, dim=2), torch.cat(values, dim=2), mask)
            parts = read.split([len(run) for run, _ in runs], dim=1)
            for (_, kind), part in zip(runs, parts, strict=True):
                pieces[kind].append(part)
        return {kind: torch.cat(parts, dim=1) for kind, parts in pieces.items()}

    def _visible_places(self, pairs: Pairs, position: int, first: int, count: int, start: int, stop: int) -> range:
        """The places of a stream's keys that this pass' pairs from `start` to `stop` may see."""
        low = first
        if position == 1 and self.config.has_windowed_stream and not pairs.has_gaps:
            low = max(first, pairs.past + start - self.config.prediction_window)
        return range(low, min(first + count, pairs.past + stop))


class ReadStream(nn.Module):
    """The stream that gives the logits, out of both, after the embedding and after each layer: what is recorded."""

    def forward(self, hidden_states: torch.Tensor, states: int, is_prediction: bool) -> torch.Tensor:
        """`[B, states + predictions, hidden]`, or one stream alone -> `[B, T, hidden]`."""
        if hidden_states.shape[1] <= states:
            return hidden_states
        return hidden_states[:, states:] if is_prediction else hidden_states[:, :states]


class DualStreamPreTrainedModel(DecoderPreTrainedModel):
    """Ties the family's configuration to the chassis."""

    config_class = DualStreamConfig
    _no_split_modules = ["DualStreamLayer"]
    # What a block sees is a mask of pairs, which the other kernels do not take.
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    # Nothing decays here.
    _keep_in_fp32_modules_strict = None
    _can_record_outputs = {"hidden_states": OutputRecorder(ReadStream, capture_initial_hidden_state=False)}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if (spread := getattr(module, "initial_spread", None)) is not None:
            init.normal_(module.weight, std=spread)

    @staticmethod
    def create_masks_for_generate(attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor | None:
        """The padding mask as it is: the pairs' own mask is made in the forward pass."""
        return attention_mask


class DualStreamModel(DualStreamPreTrainedModel, DecoderModel):
    """The dual-stream decoder without a head."""

    def __init__(self, config: DualStreamConfig):
        super().__init__(config)
        # What every prediction starts from: one learned vector.
        self.predict_embedding = None if config.stream_mode == "standard" else nn.Embedding(1, config.hidden_size)
        self.read_stream = ReadStream()
        self.post_init()

    def build_layer(self, config: DualStreamConfig, layer_idx: int) -> DualStreamLayer:
        """A layer of both streams."""
        return DualStreamLayer(config, layer_idx)

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
        num_predictions: int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Hidden states that give the logits of `input_ids` `[B, T]`; see [`DecoderModel.forward`].

        Args:
            num_predictions: predictions of the last so many tokens only, where the others need none (`query_only`);
                None = all.

        Returns:
            `[B, T, hidden]`, or `[B, num_predictions, hidden]`.
        """
        inputs_embeds = self.embed_inputs(input_ids, inputs_embeds)
        batch_size, length = inputs_embeds.shape[:2]
        position_ids, masks, layout = self._read_layout(
            inputs_embeds, attention_mask, position_ids, cache, kwargs.get("cu_seq_lens_q")
        )
        if cache is not None and has_inner_padding(attention_mask) and self.config.has_windowed_stream:
            raise ValueError(
                "attention_mask has padding between real tokens, and a sliding window, as the windowed stream has, is "
                "counted over places in a cache: put the padding on the left, or pass the whole rows without a cache"
            )
        past = 0 if cache is None else int(cache.get_seq_length())
        if use_cache and cache is None and layout.document_ids is None:
            cache = DynamicCache(config=self.config)
        padding = None
        if attention_mask is not None and (masks["linear_attention"] is not None or past):
            padding = attention_mask
        pairs = Pairs(past, length, padding, layout.document_ids, inputs_embeds.device)

        mode = self.config.stream_mode
        predictions = 0 if mode == "standard" else length
        if mode == "query_only" and num_predictions is not None:
            predictions = min(num_predictions, length)
        hidden_states = inputs_embeds
        if predictions:
            predict = self.predict_embedding(torch.zeros(1, 1, dtype=torch.long, device=inputs_embeds.device))
            hidden_states = torch.cat([inputs_embeds, predict.expand(batch_size, predictions, -1)], dim=1)
        angles = tuple(part.expand(-1, length, -1) for part in self.rotary_emb(inputs_embeds, position_ids))
        is_prediction = mode not in READS_STATES
        self.read_stream(hidden_states, length, is_prediction)
        for layer in self.layers:
            hidden_states = layer(hidden_states, pairs=pairs, position_embeddings=angles, cache=cache)
            self.read_stream(hidden_states, length, is_prediction)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)


class DualStreamForCausalLM(DualStreamPreTrainedModel, DecoderForCausalLM):
    """Dual stream with a language-model head."""

    decoder_class = DualStreamModel

    def backbone_inputs(self, logits_to_keep: int | torch.Tensor) -> dict:
        """Predictions of the positions alone whose logits are kept, where the others need none."""
        return {"num_predictions": logits_to_keep} if isinstance(logits_to_keep, int) and logits_to_keep else {}


class DualStreamForSequenceClassification(DualStreamPreTrainedModel, DecoderForSequenceClassification):
    """Dual stream with a classification head on the last token."""

    decoder_class = DualStreamModel


class DualStreamForTokenClassification(DualStreamPreTrainedModel, DecoderForTokenClassification):
    """Dual stream with a classification head on every token."""

    decoder_class = DualStreamModel


# Makes `save_pretrained` and `push_to_hub` copy the code and name the classes in `auto_map`.
DualStreamModel.register_for_auto_class("AutoModel")
DualStreamForCausalLM.register_for_auto_class("AutoModelForCausalLM")
DualStreamForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
DualStreamForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")

__all__ = [
    "DualStreamForCausalLM",
    "DualStreamForSequenceClassification",
    "DualStreamForTokenClassification",
    "DualStreamModel",
    "DualStreamPreTrainedModel",
]
