"""Conversion: the exact mode is the source, every tensor is accounted for, a killed run resumes to the same bytes."""

import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from typer.testing import CliRunner

from hf_hybrid import HwHForCausalLM
from hf_hybrid.conversion.allocate import Allocation
from hf_hybrid.conversion.convert import RECORD, convert
from hf_hybrid.conversion.head_map import HeadMap
from hf_hybrid.conversion.source_architectures import ARCHITECTURES

LAYERS, HEADS, KV_HEADS, WIDTH, HIDDEN, WINDOW = 4, 6, 2, 8, 36, 5
SIZES = {
    "vocab_size": 97,
    "hidden_size": HIDDEN,
    "intermediate_size": 56,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}
# Full-attention heads that cut through groups, leave a layer without any, and keep a whole one.
SPLIT = [[4, 5], [], [1, 2, 3, 5], list(range(HEADS))]
ALL = [list(range(HEADS))] * LAYERS


def theta(value: float) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value}}


FAMILIES = {
    "llama": LlamaConfig(**SIZES, **theta(1e4)),
    "llama31": LlamaConfig(**SIZES, rope_parameters=LLAMA31_ROPE),
    "llama_biases": LlamaConfig(**SIZES, **theta(1e4), attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3),
    "qwen2": Qwen2Config(**SIZES, **theta(1e6), **SLIDING, max_window_layers=2),
    "qwen3": Qwen3Config(**SIZES, **theta(1e6)),
    "qwen3_biases": Qwen3Config(**SIZES, **theta(1e6), **SLIDING, max_window_layers=1, attention_bias=True),
    "mistral": MistralConfig(**SIZES, **theta(1e6), sliding_window=WINDOW),
    "smollm3": SmolLM3Config(**SIZES, **theta(2e6), no_rope_layers=[1, 0, 1, 0]),
    "smollm3_sliding": SmolLM3Config(**SIZES, **theta(2e6), **SLIDING, no_rope_layer_interval=2, attention_bias=True),
}


def random_model(config, *, tied: bool = False, seed: int = 0, **changes) -> nn.Module:
    """A source whose biases and norm weights are random too, and whose attention is far from uniform."""
    config = AutoConfig.for_model(**{**config.to_dict(), "tie_word_embeddings": tied, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        spread = 0.3 if name.endswith(("bias", "norm.weight")) else 2.5 / math.sqrt(parameter.shape[-1])
        parameter.data = torch.randn_like(parameter) * spread + (1 if "norm.weight" in name else 0)
    model.tie_weights()
    return model


@pytest.fixture
def source(tmp_path) -> Path:
    """A small sharded Llama in a folder."""
    random_model(FAMILIES["llama"]).save_pretrained(tmp_path / "source", max_shard_size="30KB")
    return tmp_path / "source"


def tokens(batch: int = 3, length: int = 17) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    """Logits `[3, 17, 97]` at positions far enough out for a wrong rotary frequency to show."""
    return model(tokens(), position_ids=torch.arange(1000, 1017)[None], use_cache=False).logits


def load(folder: Path, **options) -> nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(path)
    return tensors


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def edit_config(folder: Path, *, drop: str | None = None, **changes) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    config.pop(drop, None)
    path.write_text(json.dumps(config))


def edit_weights(folder: Path, edit) -> None:
    """Rewrites the source as one file, its tensors changed by `edit`."""
    tensors = read_weights(folder)
    edit(tensors)
    for path in folder.glob("model*"):
        path.unlink()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# --- The exact mode and what it rests on ---


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_conversion_is_the_source(tmp_path, family, tied):
    model = random_model(FAMILIES[family], tied=tied)
    model.save_pretrained(tmp_path / "source", max_shard_size="30KB" if tied else "5GB")
    record = convert(tmp_path / "source", tmp_path / "out", exact=True, max_shard_size="40KB")
    converted = load(tmp_path / "out")
    assert (logits(converted) - logits(model)).abs().max() < 1e-5
    assert converted.config.tie_word_embeddings == tied
    assert record["dropped"] == {} and all(tensor["how"] != "" for tensor in record["tensors"].values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_exact_conversion_keeps_dtype_and_every_bit(tmp_path, dtype):
    model = random_model(FAMILIES["qwen3_biases"]).to(dtype)
    model.save_pretrained(tmp_path / "source", max_shard_size="30KB")
    record = convert(tmp_path / "source", tmp_path / "out", exact=True)
    source, target = read_weights(tmp_path / "source"), read_weights(tmp_path / "out")
    assert len(source) == len(target) == len(record["tensors"])
    for name, tensor in target.items():
        (origin,) = record["tensors"][name]["from"]
        assert tensor.dtype == dtype and torch.equal(tensor, source.pop(origin))
    assert not source and load(tmp_path / "out").dtype == dtype


@pytest.mark.parametrize("keep_window", [False, True], ids=["global", "windowed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_heads_without_rope_equal_the_source_without_rotation(tmp_path, family, keep_window):
    model = random_model(FAMILIES[family])
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", heads=ALL, keep_window=keep_window)
    if not keep_window:
        unwindowed = {"sliding_window": None, "use_sliding_window": False, "layer_types": None}
        changes = {name: value for name, value in unwindowed.items() if hasattr(model.config, name)}
        weights = model.state_dict()
        model = random_model(FAMILIES[family], **changes)
        model.load_state_dict(weights)
    model.model.rotary_emb.inv_freq.zero_()
    assert (logits(load(tmp_path / "out")) - logits(model)).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_holds_exactly_the_models_tensors(tmp_path, family):
    random_model(FAMILIES[family]).save_pretrained(tmp_path / "source", max_shard_size="30KB")
    record = convert(tmp_path / "source", tmp_path / "out", heads=SPLIT, max_shard_size="20KB")
    converted = load(tmp_path / "out")
    weights = read_weights(tmp_path / "out")
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in HwHForCausalLM(converted.config).state_dict().items()
    }
    assert record == json.loads((tmp_path / "out" / RECORD).read_text())
    assert record["tensors"].keys() == weights.keys()
    used = {name for tensor in record["tensors"].values() for name in tensor["from"]}
    assert used | record["dropped"].keys() == read_weights(tmp_path / "source").keys()
    assert converted.config.full_attention_heads == SPLIT
    assert logits(converted).isfinite().all()


# --- How the heads start ---


def reference_linear_head(query, key, value, decay_time):
    """Gated delta rule, token by token, with unit q and k, beta 1/2, a constant decay, read by q. `[B, T, D]` each."""
    query, key = (vectors / vectors.norm(dim=-1, keepdim=True) for vectors in (query, key))
    state, outputs = torch.zeros(len(query), WIDTH, WIDTH, dtype=torch.float64), []
    for q, k, v in zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True):
        state = state * math.exp(-1 / decay_time)
        state = state + 0.5 * k[:, :, None] * (v - torch.einsum("bij,bi->bj", state, k))[:, None, :]
        outputs.append(torch.einsum("bij,bi->bj", state, q))
    # The upcycling preset returns the value itself at the first token, as softmax attention does.
    return torch.stack([value[:, 0], *outputs[1:]], dim=1)


def reference_full_head(query, key, value, decay_time=None):
    """Causal softmax attention without positions. `[B, T, D]` each."""
    scores = query @ key.transpose(1, 2) / math.sqrt(WIDTH)
    future = torch.ones_like(scores).triu(1).bool()
    return scores.masked_fill(future, -math.inf).softmax(dim=-1) @ value


@pytest.mark.parametrize("family", ["llama_biases", "qwen2", "qwen3", "qwen3_biases"])
@torch.no_grad()
def test_heads_start_from_their_own_vectors(tmp_path, family):
    model = random_model(FAMILIES[family])
    model.save_pretrained(tmp_path / "source")
    distances = torch.linspace(0, 5, LAYERS * HEADS).view(LAYERS, HEADS)
    convert(tmp_path / "source", tmp_path / "out", heads=SPLIT, head_map=head_map(distances))
    converted = load(tmp_path / "out")
    for layer, full in enumerate(SPLIT):
        mixer, attention = converted.model.layers[layer].token_mixer, model.model.layers[layer].self_attn
        recorded = {}
        hooks = [mixer.o_proj.register_forward_pre_hook(lambda module, args, seen=recorded: seen.update(heads=args[0]))]
        norm = converted.model.layers[layer].input_layernorm
        hooks.append(norm.register_forward_hook(lambda module, args, output, seen=recorded: seen.update(hidden=output)))
        converted(tokens(), use_cache=False)
        for hook in hooks:
            hook.remove()

        hidden = recorded["hidden"]
        query = attention.q_proj(hidden).unflatten(-1, (HEADS, WIDTH))
        key = attention.k_proj(hidden).unflatten(-1, (KV_HEADS, WIDTH))
        value = attention.v_proj(hidden).unflatten(-1, (KV_HEADS, WIDTH))
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        outputs = recorded["heads"].unflatten(-1, (HEADS, WIDTH))
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            reference = reference_full_head if head in full else reference_linear_head
            decay_time = min(max(math.exp(distances[layer, head]), 2), 8)
            vectors = (query[:, :, head], key[:, :, group], value[:, :, group])
            expected = reference(*(part.double() for part in vectors), decay_time)
            assert (outputs[:, :, head] - expected).abs().max() < 2e-5, (layer, head)


def head_map(log_distances: torch.Tensor | None, granularity: str = "query_head") -> HeadMap:
    columns = HEADS if granularity == "query_head" else KV_HEADS
    tensors = {"rpd": torch.rand(LAYERS, columns)}
    if log_distances is not None:
        tensors["mean_log_distance"] = log_distances
    metadata = {
        "model": "source",
        "revision": None,
        "model_type": "llama",
        "text_digest": None,
        "settings": {},
        "granularity": granularity,
        "folding": "mean",
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "training_length": None,
        "source": "hf_hybrid",
    }
    return HeadMap(tensors, metadata)


@torch.no_grad()
def decay_times(folder: Path) -> torch.Tensor:
    """Tokens after which an all-linear model's states have decayed to 1/e `[layers, heads]`."""
    model = load(folder)
    zero = torch.zeros(1, 1, HEADS)
    return torch.stack([-1 / layer.token_mixer.linear_attention.decay(zero)[0, 0] for layer in model.model.layers])


def test_decay_follows_the_map_within_bounds_and_is_8_tokens_without(source, tmp_path):
    linear = [[]] * LAYERS
    convert(source, tmp_path / "none", heads=linear)
    torch.testing.assert_close(decay_times(tmp_path / "none"), torch.full((LAYERS, HEADS), 8.0))

    distances = torch.linspace(0, 6, LAYERS * HEADS).view(LAYERS, HEADS)
    convert(source, tmp_path / "heads", heads=linear, head_map=head_map(distances))
    torch.testing.assert_close(decay_times(tmp_path / "heads"), distances.exp().clamp(2, 8))

    distances = torch.linspace(0, 6, LAYERS * KV_HEADS).view(LAYERS, KV_HEADS)
    convert(source, tmp_path / "groups", heads=linear, head_map=head_map(distances, "kv_group"))
    expected = distances.exp().clamp(2, 8).repeat_interleave(HEADS // KV_HEADS, dim=1)
    torch.testing.assert_close(decay_times(tmp_path / "groups"), expected)


@pytest.mark.parametrize("gate", ["headwise", "elementwise"])
def test_gate_and_scale_of_full_heads_start_neutral(source, tmp_path, gate):
    convert(source, tmp_path / "plain", heads=ALL)
    overrides = {"attention_output_gate": gate, "attention_head_scale": True}
    convert(source, tmp_path / "gated", heads=ALL, overrides=overrides)
    assert (logits(load(tmp_path / "gated")) - logits(load(tmp_path / "plain"))).abs().max() < 1e-5


def test_dtype_is_cast_except_for_the_decay(source, tmp_path):
    convert(source, tmp_path / "out", heads=SPLIT, dtype=torch.bfloat16)
    for name, tensor in read_weights(tmp_path / "out").items():
        assert tensor.dtype == (torch.float32 if ".decay." in name else torch.bfloat16), name
    model = load(tmp_path / "out")
    assert model.dtype == model.config.dtype == torch.bfloat16


# --- Killed, resumed, in the way ---


def convert_and_die(source: Path, out: Path, calls: int) -> None:
    """Kills its own process at the given call of `progress`, which comes between making and writing a tensor."""

    def progress(done: int, total: int) -> None:
        nonlocal calls
        assert not out.exists()
        calls -= 1
        if calls < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    convert(source, out, heads=SPLIT, max_shard_size="20KB", progress=progress)


def test_killed_conversion_resumes_to_the_same_bytes(source, tmp_path):
    whole = tmp_path / "whole"
    calls = []
    record = convert(
        source, whole, heads=SPLIT, max_shard_size="20KB", progress=lambda done, total: calls.append((done, total))
    )
    files = record["settings"]["files"]
    assert len(files) > 4 and calls[-1][0] == calls[-1][1]

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hf_hybrid.conversion.convert"])
    for kill_at in (0, 1, len(calls) // 3, len(calls) // 2, len(calls) - 1):
        out, partial = tmp_path / f"out{kill_at}", tmp_path / f"out{kill_at}.partial"
        process = context.Process(target=convert_and_die, args=(source, out, kill_at))
        process.start()
        process.join(timeout=300)
        assert process.exitcode == -signal.SIGKILL
        assert not out.exists() and (partial / RECORD).exists()
        finished = {name: (partial / name).stat() for name in files if (partial / name).exists()}
        assert len(finished) < len(files)
        convert(source, out, heads=SPLIT, max_shard_size="20KB")
        assert digests(out) == digests(whole)
        for name, before in finished.items():
            assert (out / name).stat().st_mtime_ns == before.st_mtime_ns, f"{name} was written twice"
        assert not partial.exists()


class Stop(Exception):
    pass


def stop_at_once(done: int, total: int) -> None:
    raise Stop


def test_unfinished_conversion_is_only_taken_up_as_it_was_started(source, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert(source, out, heads=SPLIT, progress=stop_at_once)
    assert not out.exists()
    with pytest.raises(FileExistsError, match=r"out\.partial .* differs in settings\.dtype"):
        convert(source, out, heads=SPLIT, dtype=torch.float16)
    with pytest.raises(FileExistsError, match=r"settings\.full_attention_heads"):
        convert(source, out, heads=ALL)
    random_model(FAMILIES["llama"], seed=1).save_pretrained(source, max_shard_size="30KB")
    with pytest.raises(FileExistsError, match=r"source\.files"):
        convert(source, out, heads=SPLIT)
    shutil.rmtree(tmp_path / "out.partial")
    convert(source, out, heads=SPLIT)


def test_nothing_is_overwritten(source, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("folder", "file", "link"):
        with pytest.raises(FileExistsError, match=f"{name} exists and is not overwritten"):
            convert(source, tmp_path / name, exact=True)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"out\.partial exists and is no unfinished conversion"):
        convert(source, tmp_path / "out", exact=True)
    assert [path.name for path in (tmp_path / "out.partial").iterdir()] == ["thesis.txt"]


# --- Refusals: by name, before anything is written ---


def refused(source: Path, out: Path, message: str, error: type[Exception] = ValueError, **options) -> None:
    with pytest.raises(error, match=message):
        convert(source, out, **{"exact": True, **options})
    assert not out.exists() and not out.with_name(out.name + ".partial").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MixtralConfig(**SIZES), "'mixtral' is a mixture-of-experts .*num_local_experts"),
        (Qwen3MoeConfig(**SIZES), "'qwen3_moe' is a mixture-of-experts .*num_local_experts"),
        (Gemma3Config(), "'gemma3' is a multimodal .*vision_config"),
        (LlavaConfig(), "'llava' is a multimodal .*vision_config"),
        (
            LlamaConfig(**SIZES, quantization_config={"quant_method": "gptq", "bits": 4}),
            "'llama' is a quantised .*gptq.*unquantised weights",
        ),
        (GPT2Config(), "'gpt2' can't be converted; supported are llama, mistral, qwen2, qwen3, smollm3"),
    ],
    ids=["mixtral", "qwen3_moe", "gemma3", "llava", "gptq", "gpt2"],
)
def test_kinds_of_models_that_cannot_be_converted(tmp_path, config, message):
    config.save_pretrained(tmp_path / "source")
    refused(tmp_path / "source", tmp_path / "out", message)


NORM, DOWN, QUERY = "model.norm.weight", "model.layers.2.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(DOWN), f"{DOWN} is missing"),
        (lambda tensors: tensors.pop("model.embed_tokens.weight"), "embed_tokens.weight is missing"),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY][:-1].clone()}), rf"{QUERY} is \[47, 36\].*\[48, 36\]"),
        (lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.int8)}), f"{NORM} has dtype I8.*quantised"),
        (lambda tensors: tensors.update({"score.weight": torch.zeros(2, 36)}), "score.weight is not part of a llama"),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.k_norm.weight": torch.ones(8)}),
            "k_norm.weight is not",
        ),
    ],
    ids=["missing", "no_embedding", "shape", "integer", "head", "norm"],
)
def test_tensors_that_do_not_fit_the_configuration(source, tmp_path, edit, message):
    edit_weights(source, edit)
    refused(source, tmp_path / "out", message)


def test_tensor_that_an_architecture_forgets_is_not_lost(tmp_path, monkeypatch):
    random_model(FAMILIES["qwen2"]).save_pretrained(tmp_path / "source")
    monkeypatch.setitem(ARCHITECTURES, "qwen2", replace(ARCHITECTURES["qwen2"], attention_bias=False))
    refused(tmp_path / "source", tmp_path / "out", "self_attn.k_proj.bias of the source would reach no tensor")


def test_head_in_a_tied_checkpoint(source, tmp_path):
    edit_config(source, tie_word_embeddings=True)
    refused(source, tmp_path / "out", "lm_head.weight differs from model.embed_tokens.weight")
    edit_weights(
        source, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    record = convert(source, tmp_path / "out", exact=True)
    assert record["dropped"] == {"lm_head.weight": "tied: the same values as model.embed_tokens.weight"}
    assert (logits(load(tmp_path / "out")) - logits(load(source))).abs().max() < 1e-5


def test_old_rotary_buffers_are_dropped_with_a_reason(source, tmp_path):
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    edit_weights(source, lambda tensors: tensors.update({name: torch.ones(4)}))
    record = convert(source, tmp_path / "out", exact=True)
    assert record["dropped"] == {name: "rotary frequencies follow from rope_parameters"}


def test_rotary_theta_is_read_and_never_assumed(source, tmp_path):
    parameters = json.loads((source / "config.json").read_text())["rope_parameters"]
    edit_config(source, drop="rope_parameters")
    refused(source, tmp_path / "out", "states no rope_theta")
    refused(source, tmp_path / "out", "states no rope_theta", exact=False, heads=SPLIT, overrides={"linear_rope": True})
    # The spelling of older checkpoints.
    edit_config(source, rope_theta=parameters["rope_theta"], rope_scaling=None)
    convert(source, tmp_path / "old", exact=True)
    assert load(tmp_path / "old").config.rope_parameters == parameters
    edit_config(source, partial_rotary_factor=0.5)
    refused(source, tmp_path / "out", "partial_rotary_factor is 0.5")


def test_heads_without_rotary_need_no_theta(source, tmp_path):
    convert(source, tmp_path / "with", heads=SPLIT)
    edit_config(source, drop="rope_parameters")
    convert(source, tmp_path / "without", heads=SPLIT)
    assert torch.equal(logits(load(tmp_path / "with")), logits(load(tmp_path / "without")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact": False}, "heads is not given"),
        ({"heads": ALL}, "exact keeps every head"),
        ({"overrides": {"linear_rope": True}}, "exact keeps every head"),
        ({"head_map": head_map(torch.ones(LAYERS, HEADS))}, "exact keeps every head"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"exact": False, "heads": [None] * LAYERS}, "heads are .*one list of query heads"),
        ({"exact": False, "heads": [[0.5], [], [], []]}, "heads are .*whole numbers"),
        ({"exact": False, "heads": SPLIT, "overrides": {"preset": "upcycling"}}, "'preset' to 'upcycling', but the"),
        ({"exact": False, "heads": ALL[1:]}, "full_attention_heads has 3 layers"),
        ({"exact": False, "heads": [[0, 6], [], [], []]}, r"full_attention_heads\[0\] names query head 6"),
        ({"exact": False, "heads": SPLIT, "overrides": {"conv": 3}}, "'conv', which is no field"),
        ({"exact": False, "heads": SPLIT, "overrides": {"hidden_size": 3}}, "'hidden_size' to 3, but the source"),
        ({"exact": False, "heads": SPLIT, "overrides": {"linear_value_head_dim": 4}}, "linear_value_head_dim is 4"),
        ({"exact": False, "heads": SPLIT, "preset": "from_scratch"}, "linear_output_gate is 'elementwise'"),
        ({"exact": False, "heads": SPLIT, "overrides": {"linear_head_scale": False}}, "linear_head_scale=True too"),
        ({"max_shard_size": "0GB"}, "max_shard_size is '0GB'"),
        ({"max_shard_size": "1.5GB"}, "max_shard_size is '1.5GB'"),
        ({"revision": "main"}, "revision is 'main'"),
        ({"exact": False, "heads": SPLIT, "head_map": head_map(None)}, "no mean_log_distance"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_options_that_do_not_fit(source, tmp_path, options, message):
    refused(source, tmp_path / "out", message, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "config.json"),
        ({"hidden_act": "swish9"}, "config.json.*swish9"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "config.json.*spiral|spiral"),
        ({"dtype": 3}, "config.json"),
        ({"num_hidden_layers": "four"}, "config.json.*num_hidden_layers"),
        ({"vocab_size": None}, "config.json"),
        ({"head_dim": -8}, "config.json"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configurations_that_describe_no_model(source, tmp_path, changes, message):
    edit_config(source, **changes)
    refused(source, tmp_path / "out", message)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "[1, 2]", "config.json must hold a JSON object, not list"),
        ("config.json", "{", "config.json is not JSON"),
        ("model.safetensors.index.json", "[]", "index.json must hold a JSON object"),
        ("model.safetensors.index.json", "{}", "index.json must have a 'weight_map'"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}', "index.json must have a 'weight_map'"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../b"}}', "index.json must have a 'weight_map'"),
    ],
)
def test_json_files_that_hold_something_else(source, tmp_path, name, text, message):
    (source / name).write_text(text)
    refused(source, tmp_path / "out", message)


def test_a_file_that_is_no_gguf_is_named(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(40))
    refused(tmp_path / "a.gguf", tmp_path / "out", "a.gguf is not a GGUF file")


def test_heads_may_be_arrays(source, tmp_path):
    convert(source, tmp_path / "out", heads=[torch.tensor(layer).numpy() for layer in SPLIT[:1] + SPLIT[:3]])
    assert load(tmp_path / "out").config.full_attention_heads == SPLIT[:1] + SPLIT[:3]


def test_sources_that_are_not_there(tmp_path):
    refused(tmp_path / "a" / "b", tmp_path / "out", "neither a folder", FileNotFoundError)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path / "out", "neither config.json nor a .gguf")
    FAMILIES["llama"].save_pretrained(tmp_path / "empty")
    refused(tmp_path / "empty", tmp_path / "out", "holds no model.safetensors", FileNotFoundError)


# --- What a user finds in the folder ---


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {
        word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "the", "cat", "sat", "on", "mat"])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        chat_template="{% for message in messages %}the {{ message['content'] }}{% endfor %}",
    )


def test_tokenizer_chat_template_and_licence_come_along(source, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(source)
    (source / "LICENSE").write_text("Apache")
    (source / "README.md").write_text("---\nlicense: [\n---\n")
    convert(source, tmp_path / "out", heads=SPLIT)
    assert "states no licence" in (tmp_path / "out" / "README.md").read_text()
    converted = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the cat sat on the mat </s>"
    assert converted(text)["input_ids"] == tokenizer(text)["input_ids"]
    chat = [{"role": "user", "content": "cat sat"}]
    assert converted.apply_chat_template(chat, tokenize=False) == "the cat sat"
    assert (tmp_path / "out" / "LICENSE").read_text() == "Apache"


def test_generation_parameters_in_the_models_configuration_do_not_break_saving(source, tmp_path):
    (source / "generation_config.json").unlink()
    edit_config(source, temperature=0.6, top_k=7, repetition_penalty=1.2)
    convert(source, tmp_path / "out", heads=SPLIT)
    model = load(tmp_path / "out")
    assert (model.generation_config.temperature, model.generation_config.top_k) == (0.6, 7)
    assert model.generation_config.repetition_penalty == 1.2
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


def test_generation_config_is_copied(source, tmp_path):
    settings = {"do_sample": True, "temperature": 0.3, "eos_token_id": [2, 5]}
    (source / "generation_config.json").write_text(json.dumps(settings))
    convert(source, tmp_path / "out", heads=SPLIT)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == settings


LOAD_WITHOUT_PACKAGE = """
import sys, torch
sys.modules["hf_hybrid"] = None  # importing it now fails
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
tokens = torch.load(sys.argv[2])
with torch.no_grad():
    torch.save(model(tokens).logits, sys.argv[3])
model.save_pretrained(sys.argv[4])
AutoModelForCausalLM.from_pretrained(sys.argv[4], trust_remote_code=True)
AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


def test_folder_loads_in_a_fresh_process_without_the_package(source, tmp_path):
    convert(source, tmp_path / "out", heads=SPLIT, max_shard_size="30KB")
    torch.save(tokens(), tmp_path / "tokens.pt")
    arguments = [tmp_path / name for name in ("out", "tokens.pt", "logits.pt", "again")]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD_WITHOUT_PACKAGE, *map(str, arguments)]
    process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    with torch.no_grad():
        expected = load(tmp_path / "out")(tokens()).logits
    assert torch.allclose(torch.load(tmp_path / "logits.pt"), expected, atol=1e-5)


def test_hub_id_with_revision_licence_and_card(source, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "cache" / "models--owner--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "v1").write_text(commit)
    shutil.copytree(source, repository / "snapshots" / commit)
    (repository / "snapshots" / commit / "README.md").write_text("---\nlicense: apache-2.0\n---\n# tiny\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    record = convert("owner/tiny", tmp_path / "out", heads=SPLIT, revision="v1")
    assert (record["source"]["model"], record["source"]["revision"]) == ("owner/tiny", commit)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: owner/tiny\n" in card and "license: apache-2.0\n" in card and commit in card
    refused("owner/other", tmp_path / "no", "owner/other is no local folder", FileNotFoundError)


@torch.no_grad()
def test_card_states_heads_and_the_cache_as_measured(source, tmp_path):
    convert(source, tmp_path / "out", heads=SPLIT)
    card = (tmp_path / "out" / "README.md").read_text()
    model = load(tmp_path / "out")

    def cache_bytes(model: nn.Module, length: int) -> tuple[int, int]:
        """Of keys and values, and of everything else that the cache holds, for one sequence."""
        growing = fixed = 0
        for layer in model(tokens(1, length), use_cache=True).cache.layers:
            for name, value in vars(layer).items():
                values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
                held = sum(item.nbytes for item in values if isinstance(item, torch.Tensor))
                if name in ("keys", "values"):
                    growing += held
                else:
                    fixed += held
        return growing, fixed

    per_token = (cache_bytes(model, 11)[0] - cache_bytes(model, 7)[0]) // 4
    source_per_token = (cache_bytes(load(source), 11)[0] - cache_bytes(load(source), 7)[0]) // 4
    assert f"| key-value cache, bytes per token | {source_per_token:,} | {per_token:,} |" in card
    assert f"whatever its length | 0 | {cache_bytes(model, 11)[1]:,} |" in card
    assert "0 ....## 2\n1 ...... 0\n2 .###.# 4\n3 ###### 6\n" in card
    assert "raw conversion, not a healed model" in card
    convert(source, tmp_path / "exact", exact=True)
    assert "Nothing was changed" in (tmp_path / "exact" / "README.md").read_text()


# --- GGUF and the command ---


def write_gguf(path: Path, model: nn.Module, tokenizer_words: list[str]) -> None:
    """The model as an unquantised GGUF file: llama.cpp's names, its order of q and k rows, a byte-level vocabulary."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokenizer_words)
    writer.add_token_types([1] * len(tokenizer_words))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        for module, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if f".{module}." in name:
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file_is_converted_like_the_model_in_it(tmp_path):
    pytest.importorskip("gguf", reason="the package gguf reads and writes GGUF files")
    model = random_model(FAMILIES["llama"])
    words = [
        "<pad>",
        "<s>",
        "</s>",
        "a",
        "b",
        "ab",
        *(chr(65 + index) for index in range(26)),
        *(f"t{index}" for index in range(65)),
    ]
    write_gguf(tmp_path / "tiny.gguf", model, words)
    record = convert(tmp_path / "tiny.gguf", tmp_path / "out", exact=True)
    assert record["source"]["model"] == "tiny" and list(record["source"]["files"]) == ["tiny.gguf"]
    assert (logits(load(tmp_path / "out")) - logits(model)).abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab", add_special_tokens=False)["input_ids"] == [5]


def test_command_converts_and_explains(source, tmp_path):
    from hf_hybrid.cli.main import app

    allocation = Allocation(
        full_attention_heads=SPLIT,
        scores=[[0.5] * HEADS] * LAYERS,
        settings={"strategy": "random", "granularity": "query_head", "full_attention_share": 0.5, "seed": 3},
        model="source",
        revision=None,
        map_digest="0" * 64,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    allocation.save(tmp_path / "heads.json")
    head_map(torch.ones(LAYERS, HEADS)).save(tmp_path / "map.safetensors")
    command = ["convert", str(source), str(tmp_path / "out"), "--heads", str(tmp_path / "heads.json")]
    options = ["--map", str(tmp_path / "map.safetensors"), "--set", "linear_conv_kernel_dim=3", "--dtype", "bfloat16"]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    assert "source (llama): 12 full-attention heads in 4 layers" in result.output
    assert "wrote " in result.output
    model = load(tmp_path / "out")
    assert (model.config.linear_conv_kernel_dim, model.dtype) == (3, torch.bfloat16)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "strategy random" in card and "mean attended distance" in card

    for arguments, message in (
        (command, "exists and is not overwritten"),
        ([*command[:2], str(tmp_path / "b"), "--exact", "--set", "linear_rope=yes"], "is not FIELD=JSON"),
        ([*command[:2], str(tmp_path / "b"), "--exact", "--set", "linear_a_min=NaN"], "is not FIELD=JSON"),
        ([*command[:2], str(tmp_path / "b"), "--exact", "--set", "a=1", "--set", "a=2"], "gives a twice: 1 and 2"),
        (
            [*command[:2], str(tmp_path / "b"), *command[3:], "--set", 'linear_conv_kernel_dim="three"'],
            "linear_conv_kernel_dim",
        ),
        ([*command[:2], str(tmp_path / "b")], "heads is not given"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1 and message in result.output
