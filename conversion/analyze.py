"""Head analysis: from a RoPE model and a text to a head map, and a test of whether the map is right about the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_hybrid.conversion.attention_probe import LayerAttention, probe_attention
from hf_hybrid.conversion.head_map import HeadMap
from hf_hybrid.conversion.head_scores import HeadScores, sample_queries, score_heads
from hf_hybrid.conversion.source_model import SourceError
from hf_hybrid.conversion.text_data import even_windows, load_text, text_digest, tokenize, training_part

Progress = Callable[[int, int], None]  # steps done, steps in all

# Logits that are scored at once: on a CPU as many as its cache holds, on an accelerator enough to keep it busy.
CPU_ELEMENTS, ACCELERATOR_ELEMENTS = 2**19, 2**25


def analyze_heads(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Path | None = None,
    *,
    windows: int = 8,
    window_length: int = 2048,
    queries_per_window: int = 64,
    divergence: str = "kl",
    ablation: str = "drop",
    seed: int = 0,
    progress: Progress | None = None,
) -> HeadMap:
    """The head map of `model` on windows of a text, spread evenly over the part that is not held out.

    Args:
        text: a UTF-8 file; None for the default text (see text_data).
        queries_per_window: sampled from the last seven eighths of each window; all where there are fewer.
        divergence: "kl" (nats), "js" (Jensen-Shannon, bits) or "tv" (total variation). Of these "kl" best finds the
            heads that can do without rotation (README, "From a RoPE checkpoint to a healed hybrid").
        ablation: of a rotary pair in RFIS, "drop" its logit term or "unrotate" it.
        progress: called after every layer of every window.
    Raises:
        SourceError: if the text is too short, or the model has no RoPE or cannot be probed.
    """
    content = load_text(text)
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and window_length > limit:
        raise SourceError(f"windows of {window_length} tokens are longer than the model's context of {limit}")
    tokens = training_part(tokenize(tokenizer, content), text)
    tensors, wavelength_layers = score_windows(
        model,
        even_windows(tokens, window_length, windows, tokenizer=tokenizer),
        queries_per_window=queries_per_window,
        divergence=divergence,
        ablation=ablation,
        seed=seed,
        progress=progress,
    )
    config = model.config.get_text_config(decoder=True)
    heads = tensors["rpd"].shape[1]
    metadata = {
        "model": model.config._name_or_path,
        "revision": getattr(model.config, "_commit_hash", None),
        "model_type": config.model_type,
        "text_digest": text_digest(content),
        "settings": {
            "text": "pydoc_data.topics" if text is None else Path(text).name,
            "windows": windows,
            "window_length": window_length,
            "queries_per_window": queries_per_window,
            "divergence": divergence,
            "ablation": ablation,
            "seed": seed,
            "entropy_unit": "nats",
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "granularity": "query_head",
        "folding": "mean",
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "training_length": training_length(config),
        "source": "hf_hybrid",
        "wavelength_layers": wavelength_layers,
    }
    return HeadMap(tensors, metadata)


@torch.no_grad()
def score_windows(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    queries_per_window: int = 64,
    divergence: str = "kl",
    ablation: str = "drop",
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], list[int]]:
    """The tensors of a head map, means over the windows of `input_ids` [W, T]; nothing is kept between layers.

    The wavelengths are those of the layers that reach farthest, whose indices are the second result: models with local
    and global layers may use two sets. Layers without RoPE have RPD and RFIS 0.
    """
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    sums: dict[int, HeadScores] = {}
    wavelengths: dict[int, Tensor] = {}
    done = 0

    def on_layer(layer: LayerAttention) -> None:
        nonlocal done
        scores = _score_layer(layer, positions.to(layer.query.device), divergence, ablation)
        if layer.layer_idx in sums:
            scores = HeadScores(*(a + b for a, b in zip(sums[layer.layer_idx], scores, strict=True)))
        sums[layer.layer_idx] = scores
        if layer.rotary is not None and layer.layer_idx not in wavelengths:
            wavelengths[layer.layer_idx] = layer.rotary.wavelengths.cpu()
        done += 1
        if progress is not None:
            progress(done, layers * len(input_ids))

    generator = torch.Generator().manual_seed(seed)
    model.eval()
    with probe_attention(model, on_layer):
        for window in input_ids:
            positions = sample_queries(len(window), queries_per_window, generator)
            # The base model: nobody needs the logits.
            model.base_model(input_ids=window[None].to(model.device), use_cache=False)

    name = type(model).__name__
    if missing := sorted(set(range(layers)) - set(sums)):
        raise SourceError(f"layers {missing} of {name} have no softmax attention; analysis is for models that have it")
    if not wavelengths:
        raise SourceError(f"no layer of {name} rotates its queries and keys: the model has no RoPE")
    sizes = {(len(sums[layer].rpd), len(rotary)) for layer, rotary in wavelengths.items()}
    if len(sizes) > 1:
        raise SourceError(f"layers of {name} differ in (heads, rotary pairs): {sorted(sizes)}; a map holds one size")
    farthest = max(wavelengths.values(), key=lambda rotary: rotary.max().item())
    tensors = {"wavelengths": farthest}
    for index, field in enumerate(HeadScores._fields):
        by_layer = [sums[layer][index].float().cpu() / len(input_ids) for layer in range(layers)]
        if field == "rfis":
            # Layers without RoPE have no pairs.
            by_layer = [F.pad(rfis, (0, len(farthest) - rfis.shape[-1])) for rfis in by_layer]
        tensors[field] = torch.stack(by_layer)
    return tensors, [layer for layer, rotary in sorted(wavelengths.items()) if torch.equal(rotary, farthest)]


def _score_layer(layer: LayerAttention, positions: Tensor, divergence: str, ablation: str) -> HeadScores:
    query, key, rotary = layer.query[:, :, positions], layer.key, layer.rotary
    if rotary is None:
        plain_query, plain_key, pairs = None, None, positions.new_empty(0, 2)
    else:
        plain_query = rotary.at(positions).unrotate(query, keep_amplitude=True)[0]
        plain_key = rotary.unrotate(key, keep_amplitude=True)[0]
        pairs = rotary.layout.pairs
    return score_heads(
        query[0],
        key[0],
        plain_query,
        plain_key,
        pairs=pairs,
        positions=positions,
        attendable=layer.attendable(positions)[0],
        scaling=layer.scaling,
        softcap=layer.softcap,
        divergence=divergence,
        ablation=ablation,
        max_elements=CPU_ELEMENTS if query.device.type == "cpu" else ACCELERATOR_ELEMENTS,
    )


def training_length(config) -> int | None:
    """The length in tokens that the model's rotary embedding was trained at before it was scaled, if it is known."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    lengths = [parameters.get("original_max_position_embeddings") for parameters in by_layer_type or [rope]]
    known = [length for length in lengths if length is not None]
    return max(known) if known else getattr(config, "max_position_embeddings", None)


@dataclass(frozen=True)
class Validation:
    """Loss on held-out text with RoPE switched off in some heads.

    Attributes:
        share: of the heads of the whole model. heads: their number.
        choice: "none", "lowest" (RPD), "random" or "highest". seed: of a random choice, else None.
        nll: mean negative log-likelihood per token, in nats.
    """

    share: float
    heads: int
    choice: str
    seed: int | None
    nll: float


@torch.no_grad()
def validate_map(
    model: PreTrainedModel,
    head_map: HeadMap,
    input_ids: Tensor,
    *,
    shares: Sequence[float] = (0.25,),
    seeds: Sequence[int] = (0, 1, 2),
    progress: Progress | None = None,
) -> list[Validation]:
    """Losses of the running model with RoPE switched off in the lowest-RPD, random and highest-RPD heads.

    The map is right about the model if the lowest-RPD heads cost little. The first row is the model as it is.

    Args:
        input_ids: [W, T] windows of text that the map has not seen (`heldout_windows`).
    """
    rpd = head_map.rpd
    cases = [(0.0, "none", None)]
    for share in shares:
        cases += [(share, "lowest", None), *((share, "random", seed) for seed in seeds), (share, "highest", None)]
    results = []
    without_rope = torch.zeros_like(rpd, dtype=torch.bool)

    def on_layer(layer: LayerAttention) -> tuple[Tensor, Tensor] | None:
        columns = without_rope[layer.layer_idx]
        if layer.rotary is None or not columns.any():
            return None
        heads, groups = layer.query.shape[1], layer.key.shape[1]
        chosen = columns.repeat_interleave(heads // len(columns)).to(layer.query.device)[:, None, None]
        plain_query, plain_key = layer.unrotated(keep_amplitude=True)
        key, plain_key = (x.repeat_interleave(heads // groups, dim=1) for x in (layer.key, plain_key))
        return torch.where(chosen, plain_query, layer.query), torch.where(chosen, plain_key, key)

    model.eval()
    with probe_attention(model, on_layer):
        for done, (share, choice, seed) in enumerate(cases):
            chosen = _choose_heads(rpd, share, choice, seed)
            without_rope.zero_().view(-1)[chosen] = True
            nll = sum(_window_nll(model, window) for window in input_ids) / len(input_ids)
            results.append(Validation(share, len(chosen), choice, seed, nll))
            if progress is not None:
                progress(done + 1, len(cases))
    return results


def _choose_heads(rpd: Tensor, share: float, choice: str, seed: int | None) -> Tensor:
    """Flat indices of a share of the heads of rpd [L, H]."""
    if choice == "random":
        order = torch.randperm(rpd.numel(), generator=torch.Generator().manual_seed(seed))
    else:
        order = rpd.flatten().argsort(descending=choice == "highest", stable=True)
    return order[: round(share * rpd.numel())]


def _window_nll(model: PreTrainedModel, window: Tensor) -> float:
    window = window.to(model.device)
    logits = model(input_ids=window[None], use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1].float(), window[1:]).item()
