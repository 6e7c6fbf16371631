"""The README.md of a converted model: filled from its configuration, its conversion record and its source."""

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData
from transformers import PreTrainedConfig

from hf_hybrid import HwHConfig
from hf_hybrid.conversion.allocate import cache_bytes_per_token, draw_heads
from hf_hybrid.conversion.inspect_model import inspect_config

TEMPLATE = """\
---
{metadata}
---

# {name}, converted to a head-wise hybrid (HwH)

{summary}

{warning}

## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/or/id/of/this/repository", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("path/or/id/of/this/repository")
```

The model's code lies beside its weights and needs `transformers>=5.24` and nothing else. On a CUDA device it uses
flash-linear-attention where that is installed.

## Heads

One row a layer, one character a query head (`#` full attention, `.` linear), then the number of full-attention heads:

```text
{heads}
```

{allocation}

## Cache

| | source | this model |
| --- | --- | --- |
| key-value cache, bytes per token | {source_cache:,} | {cache:,} |
| states of the linear heads, bytes per sequence, whatever its length | 0 | {states:,} |

In {dtype}; the recurrent states are float32.

## How it was made

- Source: {source}, model type `{model_type}`.
- Full-attention heads: the source's rows; {positions}; {windows}.
- {linear}
- Embeddings, MLPs, norms and output projections are copied.
- Dropped: {dropped}.
- Made with {versions}. `conversion.json` beside this file names the origin of every tensor.

## Licence

{license_note}
"""


def model_card(
    config: HwHConfig,
    source: PreTrainedConfig,
    record: Mapping[str, Any],
    *,
    hub_id: str | None,
    license: str | None,
) -> str:
    """The card's text.

    Args:
        config: of the converted model, with its `dtype`.
        source: configuration of the source.
        record: what `convert` writes as conversion.json.
        hub_id: the source's hub id, which becomes `base_model`; None for a local source.
        license: the licence that the source's card states, if any.
    """
    metadata = ModelCardData(
        base_model=hub_id,
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hf-hybrid", "hwh", "hybrid", "linear-attention"],
    )
    every_head = [range(config.num_attention_heads)] * config.num_hidden_layers
    full = sum(len(heads) for heads in config.full_attention_heads)
    linear = config.num_attention_heads * config.num_hidden_layers - full
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.dtype.itemsize)
    size = inspect_config(config)
    settings, origin = record["settings"], record["source"]
    name = origin["model"].split("/")[-1]
    rotated = sum(
        rope for rope, heads in zip(config.full_attention_rope, config.full_attention_heads, strict=True) if heads
    )
    return TEMPLATE.format(
        metadata=metadata.to_yaml(),
        name=name,
        summary=(
            f"{origin['model']} with {full} of its {full + linear} attention heads kept as softmax attention and "
            f"{linear} turned into Gated DeltaNet linear attention "
            "([arXiv 2412.06464](https://arxiv.org/abs/2412.06464)), inside the same layers "
            "([arXiv 2609.02986](https://arxiv.org/abs/2609.02986))."
        ),
        warning=_warning(settings["exact"], linear, rotated, config),
        heads=draw_heads(config.full_attention_heads, config.num_attention_heads),
        allocation=_allocation(settings),
        source_cache=cache_bytes_per_token(every_head, *sizes),
        cache=size.token_bytes,
        states=size.recurrent_bytes + size.conv_bytes,
        dtype=str(config.dtype).removeprefix("torch."),
        source=f"`{origin['model']}`" + (f" at revision `{origin['revision']}`" if origin["revision"] else ""),
        model_type=origin["model_type"],
        positions=f"rotary positions in {rotated} layers" if rotated else "no rotary positions (NoPE)",
        windows=_windows(config, source),
        linear=_linear(config, settings, linear),
        dropped=", ".join(f"`{tensor}` ({why})" for tensor, why in record["dropped"].items()) or "nothing",
        versions=", ".join(f"{package} {version}" for package, version in record["versions"].items()),
        license_note=(
            f"The source's card states the licence `{license}`; these weights are derived from it."
            if license
            else "The source states no licence that the conversion could read; its terms hold for these weights too."
        ),
    )


def _warning(exact: bool, linear: int, rotated: int, config: HwHConfig) -> str:
    if exact:
        return "Nothing was changed: every head, rotary position and window is the source's, and so are the logits."
    if not linear and rotated:
        return "No head is linear, but positions or windows differ from the source: measure it before use."
    return (
        "**This is a raw conversion, not a healed model.** The heads start from the source's weights, but nothing has "
        "been trained since: expect much worse text than the source's. Calibrate and distil it before use "
        "(`hf-hybrid calibrate`, `hf-hybrid distill`)."
    )


def _allocation(settings: Mapping[str, Any]) -> str:
    if settings["exact"]:
        return "Every head was kept."
    if settings["allocation"] is None:
        return "The heads were given by hand."
    chosen = [
        f"{name.replace('_', ' ')} {value}" for name, value in settings["allocation"].items() if value is not None
    ]
    return f"The heads were allocated with {', '.join(chosen)}."


def _windows(config: HwHConfig, source: PreTrainedConfig) -> str:
    if config.sliding_window is not None:
        return (
            f"the sliding window of {config.sliding_window} tokens kept in {len(config.sliding_window_layers)} layers"
        )
    if getattr(source, "sliding_window", None) is not None:
        return f"the source's sliding window of {source.sliding_window} tokens dropped, they see the whole sequence"
    return "no sliding window, like the source"


def _linear(config: HwHConfig, settings: Mapping[str, Any], linear: int) -> str:
    if not linear:
        return "Linear heads: none."
    folded = ", with the query and key norms multiplied in" if config.qk_norm else ""
    decay = "each head's mean attended distance in the head map" if settings["head_map"] else "one value for all heads"
    return (
        f"Linear heads: the head's own query, key and value rows{folded}; convolution = identity; decay from {decay}; "
        "gate and scale neutral."
    )
