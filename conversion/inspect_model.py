"""How large a model and its cache are, from its configuration alone: the model is built without weights."""

import copy
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from hf_hybrid.conversion.source_model import FORMAT_ERRORS, SourceError, first_line, locate

# Part of each parameter, by the first of these that its name contains. Mixers have their own norms, gates and states.
PARTS = {
    "embed_tokens.": "embedding",
    ".o_proj.": "output projections",
    ".m_proj.": "output projections",
    ".attention.": "full-attention mixers",
    ".self_attn.": "full-attention mixers",
    ".linear_attention.": "linear mixers",
    ".memory.": "neural memories",
    ".token_mixer.q_": "full-attention mixers",
    ".token_mixer.k_": "full-attention mixers",
    ".token_mixer.v_": "full-attention mixers",
    "predict_embedding.": "embedding",
    ".mlp.": "MLPs",
    "norm.": "norms",
    "lm_head.": "head",
    "": "other",
}


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps of one sequence.

    Attributes:
        token_bytes: keys and values of each token.
        kept_tokens: how many tokens it keeps at most; None = all.
        recurrent_bytes, conv_bytes: states, whatever the length.
    """

    token_bytes: int
    kept_tokens: int | None
    recurrent_bytes: int
    conv_bytes: int

    def bytes_at(self, length: int) -> int:
        """Cache bytes of the layer for one sequence of `length` tokens."""
        kept = length if self.kept_tokens is None else min(length, self.kept_tokens)
        return self.token_bytes * kept + self.recurrent_bytes + self.conv_bytes


@dataclass(frozen=True)
class ModelSize:
    """Sizes of one model.

    Attributes:
        parameters: numbers of parameters by part, zero included; a tied head is the embedding, and is counted there.
        layers: what each layer caches.
        dtype: of the weights and of the cache, but for the recurrent states, which are float32.
    """

    parameters: dict[str, int]
    layers: tuple[LayerCache, ...]
    dtype: torch.dtype

    @property
    def num_parameters(self) -> int:
        """Parameters of all parts."""
        return sum(self.parameters.values())

    @property
    def token_bytes(self) -> int:
        """Bytes by which the cache of one sequence grows with each token, until a window is full."""
        return sum(layer.token_bytes for layer in self.layers)

    @property
    def windowed_token_bytes(self) -> int:
        """The part of `token_bytes` that no longer grows once the windows are full."""
        return sum(layer.token_bytes for layer in self.layers if layer.kept_tokens is not None)

    @property
    def recurrent_bytes(self) -> int:
        """Recurrent states of one sequence, whatever its length."""
        return sum(layer.recurrent_bytes for layer in self.layers)

    @property
    def conv_bytes(self) -> int:
        """States of the short convolutions of one sequence, whatever its length."""
        return sum(layer.conv_bytes for layer in self.layers)

    def cache_bytes(self, length: int) -> int:
        """Bytes of the cache of one sequence of `length` tokens."""
        return sum(layer.bytes_at(length) for layer in self.layers)


def read_config(model: str | Path) -> PreTrainedConfig:
    """The configuration of a folder, a hub id or a GGUF file. Raises `SourceError` if there is none."""
    location, gguf_file = locate(model, None)
    try:
        return AutoConfig.from_pretrained(location, gguf_file=gguf_file)
    except (OSError, ValueError, KeyError, *FORMAT_ERRORS) as error:
        raise SourceError(f"cannot read the configuration of {model}: {first_line(error)}") from error


def inspect_config(config: PreTrainedConfig) -> ModelSize:
    """The sizes of the causal language model that `config` describes.

    Raises:
        ValueError: if transformers knows no such causal language model, or a layer's cache is of an unknown kind.
    """
    config = copy.deepcopy(config)
    dtype = config.dtype or torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    parameters = dict.fromkeys(PARTS.values(), 0)
    for name, parameter in model.named_parameters():
        parameters[next(part for piece, part in PARTS.items() if piece in name)] += parameter.numel()
    return ModelSize(parameters, _layer_caches(model), dtype)


def _layer_caches(model: nn.Module) -> tuple[LayerCache, ...]:
    """Reads the widths off the modules that write the cache; the stock cache says which layers have a window."""
    itemsize = model.dtype.itemsize
    kinds = DynamicCache(config=model.config).layers
    token, recurrent, conv, known = Counter(), Counter(), Counter(), set()
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if hasattr(module, "recurrent_numbers"):
            recurrent[layer] += module.recurrent_numbers * torch.float32.itemsize
            conv[layer] += module.history_channels * module.history_length * itemsize
            known.add(layer)
        elif layer is not None and hasattr(module, "k_proj") and hasattr(module, "v_proj"):
            token[layer] += (module.k_proj.out_features + module.v_proj.out_features) * itemsize
            known.add(layer)
        elif getattr(module, "marks_positions", False):
            token[layer] += itemsize
    # A looped model has a slot for each application of a layer.
    order = getattr(model.config, "layer_order", None)
    applied = list(range(len(kinds))) if order is None else [layer for layer, _ in order()]
    missing = set(applied) - known
    if missing:
        raise ValueError(
            f"layer {min(missing)} of this {model.config.model_type} model caches something other than the keys and "
            "values of k_proj and v_proj: inspect reads the families of hf_hybrid and Transformers like Llama or Qwen3"
        )
    # A window counts the token that looks, whose own key and value need not be kept for it.
    windows = [getattr(kind, "sliding_window", None) for kind in kinds]
    return tuple(
        LayerCache(token[layer], window and window - 1, recurrent[layer], conv[layer])
        for layer, window in zip(applied, windows, strict=True)
    )
