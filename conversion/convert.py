"""From a RoPE checkpoint to an HwH checkpoint: every tensor accounted for, streamed shard by shard, resumable.

Everything is decided before the first byte is written: which source rows make which target tensor, in which file. That
plan is `conversion.json`, it follows from the arguments alone, and a run that finds its own plan in an unfinished
folder goes on where that one stopped.
"""

import json
import math
import operator
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import metadata_load, snapshot_download
from huggingface_hub.errors import HFValidationError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.hub import convert_file_size_to_int
from yaml import YAMLError

from hf_hybrid import HwHConfig, HwHForCausalLM
from hf_hybrid.conversion.allocate import Allocation
from hf_hybrid.conversion.checkpoint_stream import (
    FLOAT_DTYPES,
    INDEX,
    Shard,
    ShardReader,
    StateDictReader,
    TensorReader,
    TensorSpec,
    fingerprint,
    plan_shards,
    shard_is_written,
    write_index,
    write_shard,
)
from hf_hybrid.conversion.files import read_json, require_place, write_json
from hf_hybrid.conversion.head_map import HeadMap
from hf_hybrid.conversion.model_card import model_card
from hf_hybrid.conversion.source_architectures import (
    DROPPED,
    SourceArchitecture,
    rope_parameters,
    source_architecture,
)
from hf_hybrid.conversion.source_model import load_source, locate

RECORD = "conversion.json"
# What a user of the source finds beside its weights and expects beside the converted ones.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
# Decay time constants of linear heads, in tokens: the range that a head map may choose in, and the value without one.
# Longer ones start worse, however far the source's head looks, since the attention sink counts as a far token.
DECAY_TIMES = (2.0, 8.0)
DEFAULT_DECAY_TIME = 8.0


@dataclass(frozen=True)
class Source:
    """An opened source checkpoint.

    `name` is what the record and the card call it: no path of this machine. `tokenizer` is set where the folder has no
    tokenizer files to copy (GGUF).
    """

    name: str
    hub_id: str | None
    revision: str | None
    folder: Path
    weight_files: list[Path]
    raw_config: dict[str, Any]
    config: PreTrainedConfig
    architecture: SourceArchitecture
    reader: TensorReader
    tokenizer: PreTrainedTokenizerBase | None


@dataclass(frozen=True)
class Recipe:
    """How one target tensor is made: `build` applied to the `sources`; `how` says it in the record.

    `dtype` is set where the tensor has a dtype of its own whatever the model's is.
    """

    sources: tuple[str, ...]
    how: str
    build: Callable[..., Tensor]
    dtype: torch.dtype | None = None


def open_source(model: str | Path, *, revision: str | None = None, gguf_file: str | None = None) -> Source:
    """Opens a local folder, a hub id or a GGUF file (itself, or a folder and `gguf_file`).

    Raises:
        FileNotFoundError: no such folder, no config.json, no safetensors weights.
        ValueError: a source that cannot be converted; the message names the kind.
    """
    hub_id = None
    if not Path(model).exists():
        if Path(model).is_absolute() or len(Path(model).parts) > 2:
            raise FileNotFoundError(f"{model} is neither a folder, nor a GGUF file, nor a hub id (owner/name).")
        hub_id = str(model)
        weights = [gguf_file] if gguf_file else ["model*.safetensors", INDEX]
        patterns = [*weights, "config.json", "README.md", *COMPANIONS]
        try:
            model = snapshot_download(hub_id, revision=revision, allow_patterns=patterns)
        except (OSError, HFValidationError) as error:
            raise FileNotFoundError(f"{hub_id} is no local folder, and the hub does not give it: {error}") from error
        revision = Path(model).name
    elif revision is not None:
        raise ValueError(f"revision is {revision!r}, but {model} is local and has only one.")

    location, gguf_file = locate(model, gguf_file)
    folder = Path(location)
    tokenizer = None
    if gguf_file:
        weight_files = [folder / gguf_file]
        try:
            raw_config = load_gguf_checkpoint(str(weight_files[0]), return_tensors=False)["config"]
        except (ValueError, KeyError, IndexError, struct.error) as error:
            raise ValueError(f"{weight_files[0]} is not a GGUF file that transformers reads: {error}") from error
        architecture = source_architecture(raw_config)
        loaded, tokenizer = load_source(folder, gguf_file=gguf_file)
        config = loaded.config
        tied = {architecture.head} if config.tie_word_embeddings else set()
        reader = StateDictReader({name: value for name, value in loaded.state_dict().items() if name not in tied})
    else:
        raw_config = read_json(folder / "config.json")
        architecture = source_architecture(raw_config)
        config = _usable(folder / "config.json", lambda: AutoConfig.from_pretrained(folder))
        reader = ShardReader(folder)
        weight_files = reader.files
    return Source(
        name=hub_id or (weight_files[0].stem if gguf_file else folder.resolve().name),
        hub_id=hub_id,
        revision=revision,
        folder=folder,
        weight_files=weight_files,
        raw_config=raw_config,
        config=config,
        architecture=architecture,
        reader=reader,
        tokenizer=tokenizer,
    )


def _head_lists(heads: Sequence[Sequence[int]]) -> list[list[int]]:
    try:
        return [[operator.index(head) for head in layer] for layer in heads]
    except TypeError as error:
        raise ValueError(f"heads are {heads!r}: give one list of query heads, whole numbers, per layer.") from error


def _usable(path: Path, build: Callable[[], Any]) -> Any:
    """What `build` makes of a configuration file. Raises `ValueError` naming the file where it can't."""
    try:
        return build()
    except Exception as error:  # transformers checks few values: a wrong one fails anywhere, as anything
        raise ValueError(f"{path} is not usable by transformers: {type(error).__name__}: {error}") from error


def convert(
    source: str | Path,
    out: str | Path,
    *,
    heads: Allocation | Sequence[Sequence[int]] | None = None,
    exact: bool = False,
    head_map: HeadMap | None = None,
    keep_rope: bool = False,
    keep_window: bool = False,
    preset: str = "upcycling",
    overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    revision: str | None = None,
    gguf_file: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Writes the Hub-ready HwH checkpoint `out` from a RoPE checkpoint.

    The work is done in `out` + ".partial" beside it, which becomes `out` when it is complete. Called again with the
    same arguments after a kill, it goes on with the first unfinished shard; the result is the same to the byte.

    Args:
        source: local folder, hub id, or GGUF file.
        out: folder to write; must not exist.
        heads: the query heads of each layer that stay full attention, or an allocation that says so.
        exact: every head full attention, with the source's own rotary layers and windows: the source model itself.
        head_map: sets the decay of each linear head from its mean attended distance (8 tokens without a map).
        keep_rope: full-attention heads keep rotary positions in the layers where the source has them.
        keep_window: full-attention heads keep the source's sliding windows.
        preset: the HwHConfig preset for everything else.
        overrides: HwHConfig fields to set otherwise than the preset.
        dtype: floating-point dtype of the weights; None keeps each tensor's. Decay parameters are always float32.
        max_shard_size: bytes, or such as "5GB".
        revision: of a hub id.
        gguf_file: name of the GGUF file in `source`.
        progress: called with bytes done and bytes in all.

    Returns:
        The record that is also written as `conversion.json`: source, settings, origin of every tensor, dropped tensors.

    Raises:
        FileExistsError: `out` exists, or an unfinished conversion with other arguments lies in its way.
        FileNotFoundError, ValueError: the source, the heads or an option does not fit; nothing has been written then.
    """
    out = require_place(out)
    if exact and (heads is not None or overrides or head_map is not None):
        raise ValueError("exact keeps every head as it is: give it without heads, head map and overrides.")
    if not exact and heads is None:
        raise ValueError("heads is not given: say which heads stay full attention (hf-hybrid allocate), or exact.")
    if dtype not in (None, *FLOAT_DTYPES.values()):
        raise ValueError(f"dtype is {dtype!r}: give one of {', '.join(map(str, FLOAT_DTYPES.values()))}, or None.")
    opened = open_source(source, revision=revision, gguf_file=gguf_file)
    try:
        dropped = account_for_source(opened)
        if isinstance(heads, Allocation):
            heads.check_model(opened.config)
            full_attention_heads = heads.full_attention_heads
        else:
            every_head = range(opened.config.num_attention_heads)
            full_attention_heads = [every_head] * opened.config.num_hidden_layers if exact else _head_lists(heads)
        config = hwh_config(
            opened,
            full_attention_heads,
            keep_rope=keep_rope or exact,
            keep_window=keep_window or exact,
            preset=preset,
            overrides=overrides or {},
            dtype=dtype,
        )
        recipes = plan_tensors(opened.architecture, config, _decay_times(config, head_map))
        specs = plan_specs(opened.reader, config, recipes, dropped, dtype)
        shards = plan_shards(specs, _shard_bytes(max_shard_size))
        record = {
            "source": {
                "model": opened.name,
                "revision": opened.revision,
                "model_type": opened.architecture.model_type,
                "files": {path.name: fingerprint(path) for path in opened.weight_files},
            },
            "settings": {
                "exact": exact,
                "keep_rope": keep_rope or exact,
                "keep_window": keep_window or exact,
                "preset": preset,
                "overrides": dict(overrides or {}),
                "dtype": dtype and str(dtype).removeprefix("torch."),
                "full_attention_heads": config.full_attention_heads,
                "allocation": heads.settings if isinstance(heads, Allocation) else None,
                "head_map": head_map and head_map.digest(),
                "files": [shard.name for shard in shards],
            },
            "versions": {name: version(name) for name in ("hf-hybrid", "transformers", "torch")},
            "tensors": {name: {"from": list(recipe.sources), "how": recipe.how} for name, recipe in recipes.items()},
            "dropped": dropped,
        }
        # As it will be read back: a resumed run compares the two.
        record = json.loads(json.dumps(record))
        folder = out.with_name(out.name + ".partial")
        _start_or_resume(folder, record, shards)
        _write_companions(folder, opened, config)
        card = model_card(config, opened.config, record, hub_id=opened.hub_id, license=_license(opened.folder))
        (folder / "README.md").write_text(card, encoding="utf-8")
        _write_weights(folder, shards, recipes, opened.reader, progress or (lambda done, total: None))
        folder.rename(out)
    finally:
        opened.reader.close()
    return record


def hwh_config(
    source: Source,
    full_attention_heads: Sequence[Sequence[int]],
    *,
    keep_rope: bool,
    keep_window: bool,
    preset: str,
    overrides: Mapping[str, Any],
    dtype: torch.dtype | None,
) -> HwHConfig:
    """The converted model's configuration. Arguments are those of [`convert`].

    Raises:
        ValueError: the heads or an override does not fit the source, or has no neutral start.
    """
    architecture, config = source.architecture, source.config
    fields = {"preset": preset, **architecture.hwh_fields(config)}
    fields["full_attention_heads"] = [sorted(layer) for layer in full_attention_heads]
    if keep_rope:
        rotated = architecture.rope_layers(config)
        fields["full_attention_rope"] = [layer in rotated for layer in range(config.num_hidden_layers)]
    if keep_window and (layers := architecture.window_layers(config)):
        fields |= {"sliding_window": config.sliding_window, "sliding_window_layers": layers}
    rotary_error = None
    try:
        fields["rope_parameters"] = rope_parameters(config, source.raw_config)
    except ValueError as error:
        rotary_error = error
    if unknown := sorted(set(overrides) - set(HwHConfig.__dataclass_fields__)):
        raise ValueError(f"overrides name {unknown[0]!r}, which is no field of HwHConfig.")
    if "mlp_taper" in overrides:
        raise ValueError(
            f"overrides set mlp_taper to {overrides['mlp_taper']!r}, but conversion copies the source's MLPs: convert "
            "first, then narrow them with hf-hybrid taper."
        )
    if settled := sorted(set(overrides) & set(fields)):
        raise ValueError(
            f"overrides set {settled[0]!r} to {overrides[settled[0]]!r}, but the source and heads settle it."
        )

    hwh = HwHConfig(**fields, **overrides)
    if rotary_error and hwh.uses_rotary_positions:
        raise rotary_error
    hwh.dtype = dtype or FLOAT_DTYPES[source.reader.specs[architecture.embedding].dtype]
    hwh.architectures = [HwHForCausalLM.__name__]
    _refuse_without_neutral_start(hwh)
    return hwh


def _refuse_without_neutral_start(config: HwHConfig) -> None:
    """Raises ValueError for options under which a converted head could not start as the source's head."""
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        if getattr(config, name) != config.head_dim:
            raise ValueError(
                f"{name} is {getattr(config, name)}, but the source's heads have head_dim {config.head_dim}: "
                "their rows fill no other width."
            )
    if config.linear_output_gate == "elementwise":
        raise ValueError(
            "linear_output_gate is 'elementwise', a SiLU: its neutral start, zero, would silence every linear head. "
            "Give 'headwise' or 'none'."
        )
    for branch, gate, scale in (
        ("attention", config.attention_output_gate, config.attention_head_scale),
        ("linear", config.linear_output_gate, config.linear_head_scale),
    ):
        if gate != "none" and not scale:
            raise ValueError(
                f"{branch}_output_gate is {gate!r} and starts at 1/2: give {branch}_head_scale=True too, "
                "which makes up for it."
            )


def account_for_source(source: Source) -> dict[str, str]:
    """Checks the source against its own configuration; returns the tensors to drop, each with the reason.

    Raises:
        ValueError: a tensor that the configuration asks for is absent, has another shape or no float dtype, or one is
            there that nothing explains.
    """
    architecture, specs = source.architecture, source.reader.specs
    expected = _usable(
        source.folder / "config.json",
        lambda: _shapes(lambda: AutoModelForCausalLM.from_config(source.config), tied_head=architecture.head),
    )
    for name, shape in expected.items():
        if name not in specs:
            raise ValueError(f"{source.name}: tensor {name} is missing; config.json asks for it, {list(shape)}.")
        if specs[name].shape != shape:
            raise ValueError(
                f"{source.name}: tensor {name} is {list(specs[name].shape)}, but config.json makes it {list(shape)}."
            )
        if specs[name].dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{source.name}: tensor {name} has dtype {specs[name].dtype}, so the model is quantised. Convert the "
                "unquantised weights it was made from."
            )
    dropped = {}
    for name in sorted(specs.keys() - expected.keys()):
        reason = next((reason for ending, reason in DROPPED.items() if name.endswith(ending)), None)
        if name == architecture.head:
            _check_tied(source)
            reason = f"tied: the same values as {architecture.embedding}"
        if reason is None:
            raise ValueError(
                f"{source.name}: tensor {name} is not part of a {architecture.model_type} model with this config.json, "
                "and would be lost."
            )
        dropped[name] = reason
    return dropped


def _check_tied(source: Source) -> None:
    head, embedding = (source.reader.tensor(name) for name in (source.architecture.head, source.architecture.embedding))
    if not torch.equal(head, embedding):
        raise ValueError(
            f"{source.name}: tie_word_embeddings is true, but {source.architecture.head} differs from "
            f"{source.architecture.embedding}. Set it to false in config.json if the head is the trained one."
        )


def _shapes(build: Callable[[], nn.Module], *, tied_head: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a model saves, without allocating it; a tied head is not saved."""
    with torch.device("meta"):
        model = build()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del shapes[tied_head]
    return shapes


def _shard_bytes(size: int | str) -> int:
    try:
        num_bytes = convert_file_size_to_int(int(size) if isinstance(size, str) and size.isdecimal() else size)
    except ValueError:
        num_bytes = 0
    if num_bytes <= 0:
        raise ValueError(
            f"max_shard_size is {size!r}: give bytes, or a whole number and a unit such as '5GB' or '500MB'."
        )
    return num_bytes


def _decay_times(config: HwHConfig, head_map: HeadMap | None) -> Tensor:
    """Decay time constants in tokens `[layers, heads]`: the geometric mean of each head's attended distances."""
    shape = (config.num_hidden_layers, config.num_attention_heads)
    if head_map is None:
        return torch.full(shape, DEFAULT_DECAY_TIME, dtype=torch.float64)
    if "mean_log_distance" not in head_map.tensors:
        raise ValueError(
            f"the head map of {head_map.metadata['model']} (source: {head_map.metadata['source']}) has no "
            "mean_log_distance, which sets the linear heads' decay; convert without a map for decay times of "
            f"{DEFAULT_DECAY_TIME:g} tokens."
        )
    distances = head_map.tensors["mean_log_distance"].double()
    if head_map.metadata["granularity"] == "kv_group":
        distances = distances.repeat_interleave(head_map.group_size, dim=1)
    if tuple(distances.shape) != shape:
        raise ValueError(
            f"the head map of {head_map.metadata['model']} has {list(distances.shape)} layers and heads, the model has "
            f"{list(shape)}."
        )
    return distances.exp().clamp(*DECAY_TIMES)


def head_rows(weight: Tensor, *, heads: Sequence[int], head_dim: int) -> Tensor:
    """The rows of `heads`, in that order: `[H * D, ...]` -> `[len(heads) * D, ...]`."""
    if list(heads) == list(range(weight.shape[0] // head_dim)):
        return weight
    return weight.unflatten(0, (-1, head_dim))[list(heads)].flatten(0, 1)


def normed_head_rows(weight: Tensor, norm: Tensor, *, heads: Sequence[int], head_dim: int) -> Tensor:
    """[`head_rows`] with the per-head norm's weight `[D]` multiplied in.

    A linear head scales queries and keys to unit length, which undoes the RMS factor of the source's norm and leaves
    its weight: unit(w * x / rms(x)) = unit(diag(w) x).
    """
    rows = head_rows(weight, heads=heads, head_dim=head_dim).unflatten(0, (-1, head_dim))
    factors = norm.double().view(head_dim, *[1] * (weight.dim() - 1))
    return (rows.double() * factors).flatten(0, 1).to(weight.dtype)


def _identity_taps(channels: int, taps: int) -> Tensor:
    weight = torch.zeros(channels, 1, taps)
    weight[..., -1] = 1
    return weight


def plan_tensors(architecture: SourceArchitecture, config: HwHConfig, decay_times: Tensor) -> dict[str, Recipe]:
    """The recipe of every target tensor, in the order in which they are written.

    Args:
        architecture: where the source keeps its tensors.
        config: of the converted model.
        decay_times: tokens `[layers, heads]`.
    """

    def copied(name: str) -> Recipe:
        return Recipe((name,), "copied", lambda tensor: tensor)

    def parts(bias: bool) -> tuple[str, ...]:
        return ("weight", "bias") if bias else ("weight",)

    def layer_recipes(layer: int) -> Iterator[tuple[str, Recipe]]:
        prefix = architecture.layer.format(layer=layer)
        for module in architecture.copied:
            for part in parts(config.mlp_bias and module.startswith("mlp.")):
                yield f"{module}.{part}", copied(f"{prefix}{module}.{part}")
        heads = config.full_attention_heads[layer]
        linear = [head for head in range(config.num_attention_heads) if head not in heads]
        if heads:
            for name, recipe in _attention_recipes(architecture, config, prefix, heads):
                yield f"token_mixer.attention.{name}", recipe
        if linear:
            for name, recipe in _linear_recipes(architecture, config, prefix, linear, decay_times[layer]):
                yield f"token_mixer.linear_attention.{name}", recipe
        for part in parts(config.attention_output_bias):
            yield f"token_mixer.o_proj.{part}", copied(f"{prefix}{architecture.output}.{part}")

    recipes = {"model.embed_tokens.weight": copied(architecture.embedding)}
    for layer in range(config.num_hidden_layers):
        recipes |= {f"model.layers.{layer}.{name}": recipe for name, recipe in layer_recipes(layer)}
    recipes["model.norm.weight"] = copied(architecture.final_norm)
    if not config.tie_word_embeddings:
        recipes["lm_head.weight"] = copied(architecture.head)
    return recipes


def _projections(
    architecture: SourceArchitecture, config: HwHConfig, prefix: str, heads: list[int], kv_heads: list[int], fold: bool
) -> Iterator[tuple[str, Recipe]]:
    """q_proj, k_proj and v_proj of one branch; `fold` multiplies the source's query and key norms in."""
    for name, module, norm, rows, kind in (
        ("q_proj", architecture.query, architecture.query_norm, heads, "query"),
        ("k_proj", architecture.key, architecture.key_norm, kv_heads, "key-value"),
        ("v_proj", architecture.value, None, kv_heads, "key-value"),
    ):
        for part in ("weight", "bias") if config.attention_bias else ("weight",):
            sources, how, build = (f"{prefix}{module}.{part}",), f"rows of {kind} heads {rows}", head_rows
            if fold and norm:
                sources, how, build = (
                    (*sources, f"{prefix}{norm}.weight"),
                    f"{how}, times norm weight",
                    normed_head_rows,
                )
            yield f"{name}.{part}", Recipe(sources, how, partial(build, heads=rows, head_dim=config.head_dim))


def _read_out(
    gate: str, num_heads: int, head_scale: bool, norm: bool, config: HwHConfig, shrink: float = 1.0
) -> Iterator[tuple[str, Recipe]]:
    """Norm, gate and scale of one branch, which together start as the identity on heads without their `shrink`."""
    if norm:
        yield "o_norm.weight", Recipe((), "ones", lambda: torch.ones(config.head_dim))
    if gate != "none":
        width = num_heads * (config.head_dim if gate == "elementwise" else 1)
        yield (
            "g_proj.weight",
            Recipe((), "zeros: the gate starts at 1/2", lambda: torch.zeros(width, config.hidden_size)),
        )
    if head_scale:
        # A norm takes the shrinking away by itself.
        scale = (1.0 if norm else 1 / shrink) * (1.0 if gate == "none" else 2.0)
        causes = ["the gate's 1/2"] * (gate != "none") + [f"the recurrence's {shrink:g}"] * (shrink != 1 and not norm)
        how = f"{scale:g}" + (f": makes up for {' and '.join(causes)}" if causes else "")
        yield "head_scale", Recipe((), how, lambda: torch.full((num_heads,), scale))


def _attention_recipes(
    architecture: SourceArchitecture, config: HwHConfig, prefix: str, heads: list[int]
) -> Iterator[tuple[str, Recipe]]:
    group_size = config.num_attention_heads // config.num_key_value_heads
    kv_heads = sorted({head // group_size for head in heads})
    yield from _projections(architecture, config, prefix, heads, kv_heads, fold=False)
    if config.qk_norm:
        for name, module in (("q_norm", architecture.query_norm), ("k_norm", architecture.key_norm)):
            yield f"{name}.weight", Recipe((f"{prefix}{module}.weight",), "copied", lambda tensor: tensor)
    yield from _read_out(
        config.attention_output_gate, len(heads), config.attention_head_scale, config.attention_output_norm, config
    )


def _linear_recipes(
    architecture: SourceArchitecture, config: HwHConfig, prefix: str, heads: list[int], decay_times: Tensor
) -> Iterator[tuple[str, Recipe]]:
    group_size = config.num_attention_heads // config.num_key_value_heads
    kv_heads = [head // group_size for head in heads]
    yield from _projections(architecture, config, prefix, heads, kv_heads, fold=architecture.qk_norm)
    for name, how in (("a_proj", "zeros: the decay starts constant"), ("b_proj", "zeros: beta starts at its middle")):
        yield f"{name}.weight", Recipe((), how, lambda: torch.zeros(len(heads), config.hidden_size))
    channels, taps = 3 * len(heads) * config.head_dim, config.linear_conv_kernel_dim
    yield "conv1d.weight", Recipe((), "identity: last tap 1, others 0", lambda: _identity_taps(channels, taps))
    yield "decay.A_log", Recipe((), "zeros: rate 1", lambda: torch.zeros(len(heads)), torch.float32)
    # exp(A_log) * softplus(dt_bias) = 1 / tau, so each token multiplies the state by exp(-1 / tau).
    times = [float(decay_times[head]) for head in heads]
    biases = [math.log(math.expm1(1 / time)) for time in times]
    how = f"inverse softplus of 1 / tau, tau = {[round(time, 2) for time in times]} tokens"
    yield "decay.dt_bias", Recipe((), how, lambda: torch.tensor(biases), torch.float32)
    # The delta rule shrinks unit queries by D^-1/2, so that it would read a stored value back that much smaller.
    shrink = config.linear_key_head_dim**-0.5
    yield from _read_out(
        config.linear_output_gate, len(heads), config.linear_head_scale, config.linear_output_norm, config, shrink
    )


def plan_specs(
    reader: TensorReader,
    config: HwHConfig,
    recipes: Mapping[str, Recipe],
    dropped: Mapping[str, str],
    dtype: torch.dtype | None,
) -> dict[str, TensorSpec]:
    """Shape and dtype of every target tensor, from running its recipe on tensors without data.

    Raises:
        ValueError: a source tensor is neither used nor dropped, or recipes and model disagree on a tensor.
    """
    used = {part for recipe in recipes.values() for part in recipe.sources}
    if lost := sorted(reader.specs.keys() - used - dropped.keys()):
        raise ValueError(f"tensor {lost[0]} of the source would reach no tensor of the converted model.")
    specs = {}
    with torch.device("meta"):
        for name, recipe in recipes.items():
            parts = [reader.specs[part] for part in recipe.sources]
            tensors = [torch.empty(part.shape, dtype=FLOAT_DTYPES[part.dtype]) for part in parts]
            # Its own dtype, else the one asked for, else that of the tensor it is made from, else the model's.
            target = recipe.dtype or dtype or (tensors[0].dtype if tensors else config.dtype)
            specs[name] = TensorSpec.of(recipe.build(*tensors).to(target))
    expected = _shapes(lambda: HwHForCausalLM(config), tied_head="lm_head.weight")
    for name in sorted(specs.keys() | expected.keys()):
        planned = specs[name].shape if name in specs else None
        if planned != expected.get(name):
            raise ValueError(f"tensor {name}: planned {planned}, but the converted model has {expected.get(name)}.")
    return specs


def _start_or_resume(folder: Path, record: dict[str, Any], shards: list[Shard]) -> None:
    """Makes the working folder, or accepts one that was started with the same record."""
    path = folder / RECORD
    if path.is_file():
        found = read_json(path)
        if found != record:
            other = [
                f"{part}.{key}"
                for part, entries in record.items()
                for key, value in entries.items()
                if found.get(part, {}).get(key) != value
            ]
            raise FileExistsError(
                f"{folder} holds an unfinished conversion that differs in {', '.join(other[:3])}. Finish it as it was "
                "started, or remove it."
            )
    elif folder.exists() and any(entry.name != f"{RECORD}.tmp" for entry in folder.iterdir()):
        raise FileExistsError(f"{folder} exists and is no unfinished conversion. Remove it, or choose another folder.")
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    num_bytes = sum(shard.num_bytes for shard in shards if not shard_is_written(folder, shard))
    if (free := shutil.disk_usage(parent).free) < num_bytes:
        raise OSError(f"{parent} has {free / 1e9:.2f} GB free, the converted weights need {num_bytes / 1e9:.2f} GB.")
    folder.mkdir(exist_ok=True)
    write_json(path, record)


def _write_companions(folder: Path, source: Source, config: HwHConfig) -> None:
    """Configuration, model code, tokenizer, chat template, generation config, licence."""
    # Only the class is looked at: it says which code files are copied. The configuration names every class.
    custom_object_save(HwHForCausalLM.__new__(HwHForCausalLM), folder)
    config.save_pretrained(folder)
    for pattern in COMPANIONS:
        for path in source.folder.glob(pattern):
            if path.is_file():
                target = folder / path.relative_to(source.folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(folder)
    if not (folder / "generation_config.json").is_file():
        # Old checkpoints keep generation parameters in config.json, where saving refuses them.
        names = [name for name in GenerationConfig().to_dict() if source.raw_config.get(name) is not None]
        write_json(
            folder / "generation_config.json",
            {name: source.raw_config[name] for name in names if name != "transformers_version"},
        )


def _license(folder: Path) -> str | None:
    """The licence that the source's own card states; None without a card, or with one that can't be read."""
    card = folder / "README.md"
    try:
        return (metadata_load(card) or {}).get("license") if card.is_file() else None
    except (ValueError, YAMLError):
        return None


def _write_weights(
    folder: Path,
    shards: list[Shard],
    recipes: Mapping[str, Recipe],
    reader: TensorReader,
    progress: Callable[[int, int], None],
) -> None:
    total = sum(shard.num_bytes for shard in shards)
    done = 0
    for shard in shards:
        if shard_is_written(folder, shard):
            done += shard.num_bytes
            progress(done, total)
            continue

        def make(name: str, shard: Shard = shard) -> Tensor:
            nonlocal done
            recipe, spec = recipes[name], shard.specs[name]
            tensor = recipe.build(*[reader.tensor(part) for part in recipe.sources]).to(FLOAT_DTYPES[spec.dtype])
            done += spec.num_bytes
            progress(done, total)
            return tensor

        write_shard(folder, shard, make)
    write_index(folder, shards)
