"""From a model and a text to a head map: the whole path on small models, its errors, its texts, its command."""

import math

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

from hf_hybrid.cli.main import app
from hf_hybrid.conversion import text_data
from hf_hybrid.conversion.analyze import analyze_heads, score_windows, training_length, validate_map
from hf_hybrid.conversion.attention_probe import probe_attention
from hf_hybrid.conversion.head_map import HeadMap
from hf_hybrid.conversion.source_model import SourceError, load_source

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 6, 2, 8
SIZES = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def small_model(model_type: str = "llama", **settings):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**SIZES, **settings})).eval()


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(text_data.load_text()[:1500], encoding="utf-8")
    return path


@pytest.fixture
def checkpoint(tmp_path):
    small_model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def dense_rpd(model, input_ids, divergence) -> torch.Tensor:
    """[L, H] from whole attention matrices in float64, over all queries behind the first eighth of each window."""
    rows = []

    def on_layer(layer):
        matrices = []
        for query, key in ((layer.query, layer.key), layer.unrotated()):
            key = key.repeat_interleave(HEADS // KV_HEADS, dim=1)
            logits = layer.scaling * query.double() @ key.double().mT
            matrices.append(logits.masked_fill(~torch.ones(logits.shape[-2:]).tril().bool(), -torch.inf).softmax(-1))
        a, b = (matrix[0, :, input_ids.shape[1] // 8 :] for matrix in matrices)
        middle = (a + b) / 2
        if divergence == "js":
            rpd = sum(torch.where(x > 0, x * (x / middle).log2(), 0).sum(-1) for x in (a, b)) / 2
        else:
            rpd = torch.where(a > 0, a * (a / b).log(), 0).sum(-1)
        rows.append(rpd.mean(-1))

    with torch.no_grad(), probe_attention(model, on_layer):
        for window in input_ids:
            model(window[None], use_cache=False)
    return torch.stack(rows).view(len(input_ids), LAYERS, HEADS).mean(0)


@pytest.mark.parametrize("divergence", ["kl", "js"])
def test_scores_are_means_over_windows_and_queries(divergence):
    model, input_ids = small_model(), torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(1))
    steps = []
    options = {
        "queries_per_window": 99,
        "divergence": divergence,
        "progress": lambda done, total: steps.append((done, total)),
    }
    tensors, layers = score_windows(model, input_ids, **options)
    assert layers == list(range(LAYERS)) and steps == [(step, 3 * LAYERS) for step in range(1, 3 * LAYERS + 1)]
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    by_head = {name: [LAYERS, HEADS] for name in ("rpd", "mean_distance", "mean_log_distance", "entropy")}
    assert shapes == {"rfis": [LAYERS, HEADS, HEAD_DIM // 2], "wavelengths": [HEAD_DIM // 2], **by_head}
    torch.testing.assert_close(tensors["rpd"].double(), dense_rpd(model, input_ids, divergence), rtol=0, atol=1e-5)
    assert tensors["rpd"].min() > 1e-3
    del options["progress"]
    alone = [score_windows(model, window[None], **options)[0]["rfis"] for window in input_ids]
    torch.testing.assert_close(tensors["rfis"], torch.stack(alone).mean(0))


def test_sampled_queries_repeat_with_the_seed_and_come_near_all_queries():
    model, input_ids = small_model(), torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(2))
    everything, few, again, other = (
        score_windows(model, input_ids, queries_per_window=count, seed=seed)[0]["rpd"]
        for count, seed in ((99, 0), (20, 0), (20, 0), (20, 1))
    )
    assert torch.equal(few, again) and not torch.equal(few, other)
    assert (few - everything).abs().max() < 0.2 * everything.mean()


def test_a_layer_without_rope_scores_exactly_zero():
    model = small_model("smollm3", no_rope_layers=[1, 0, 1])
    tensors, layers = score_windows(model, torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(3)))
    assert layers == [0, 2]
    for name in ("rpd", "rfis"):
        assert (tensors[name][[0, 2]] > 0).all() and (tensors[name][1] == 0).all()
    assert (tensors["entropy"] > 0).all() and (tensors["mean_distance"] > 0).all()


def test_local_and_global_layers_report_the_wavelengths_that_reach_farthest():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = small_model("gemma3_text", layer_types=types, sliding_window=6)
    tensors, layers = score_windows(model, torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(4)))
    assert layers == [1]
    expected = 2 * math.pi * 1e6 ** (torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    torch.testing.assert_close(tensors["wavelengths"], expected, rtol=1e-4, atol=0)
    # A sliding window bounds how far a head can look.
    assert tensors["mean_distance"][[0, 2]].max() < 6 < tensors["mean_distance"][1].min()


def test_analysis_of_a_text_makes_a_map_with_its_origin(text_file, tmp_path):
    model = small_model()
    settings = {"windows": 3, "window_length": 64, "queries_per_window": 8, "divergence": "kl", "seed": 5}
    head_map = analyze_heads(model, byte_tokenizer(), text_file, ablation="unrotate", **settings)
    head_map.save(tmp_path / "map.safetensors")
    loaded = HeadMap.load(tmp_path / "map.safetensors")
    assert loaded.metadata == head_map.metadata and torch.equal(loaded.rpd, head_map.rpd)
    expected = {**settings, "ablation": "unrotate", "text": "text.txt", "dtype": "float32", "entropy_unit": "nats"}
    assert loaded.metadata["settings"] == expected
    assert loaded.metadata["text_digest"] == text_data.text_digest(text_file.read_text())
    assert loaded.metadata["training_length"] == 256 and loaded.metadata["num_key_value_heads"] == KV_HEADS
    # The windows are those of the first four fifths of the text.
    tokens = text_data.tokenize(byte_tokenizer(), text_file.read_text())[: 1500 * 4 // 5]
    windows = torch.stack([tokens[start : start + 64] for start in (0, (1200 - 64) // 2, 1200 - 64)])
    options = {"queries_per_window": 8, "divergence": "kl", "ablation": "unrotate", "seed": 5}
    assert torch.equal(score_windows(model, windows, **options)[0]["rpd"], loaded.rpd)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"windows": 9, "window_length": 200},
            r"need 1800 tokens, it has 1200.*at most 6 windows",
        ),
        ({"windows": 1, "window_length": 257}, "windows of 257 tokens are longer than the model's context of 256"),
        ({"windows": 0, "window_length": 64}, "0 windows of 64 tokens"),
    ],
    ids=["text-too-short", "beyond-context", "no-window"],
)
def test_impossible_windows_are_refused(settings, message, text_file):
    with pytest.raises(SourceError, match=message):
        analyze_heads(small_model(), byte_tokenizer(), text_file, **settings)


def test_models_without_rope_in_any_layer_or_without_attention_are_refused():
    input_ids = torch.randint(256, (1, 40))
    with pytest.raises(SourceError, match="no layer of SmolLM3ForCausalLM rotates"):
        score_windows(small_model("smollm3", no_rope_layers=[0, 0, 0]), input_ids)
    with pytest.raises(SourceError, match="GPT2Attention is given no rotary position embeddings"):
        score_windows(small_model("gpt2", n_embd=24, n_layer=2, n_head=3), input_ids)
    linear = {"layer_types": ["linear_attention", "full_attention", "full_attention"], "linear_num_value_heads": 4}
    model = small_model("qwen3_next", linear_num_key_heads=2, num_experts=4, num_experts_per_tok=2, **linear)
    with pytest.raises(SourceError, match=r"layers \[0\] of Qwen3NextForCausalLM have no softmax attention"):
        score_windows(model, input_ids)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 256),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 256),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}, 64),
    ],
    ids=["default", "linear", "yarn"],
)
def test_training_length_is_the_one_before_scaling(rope, length):
    assert training_length(LlamaConfig(**SIZES, rope_parameters=rope)) == length


def test_validation_switches_rope_off_in_the_heads_that_the_map_names():
    model, input_ids = small_model(), torch.randint(256, (2, 50), generator=torch.Generator().manual_seed(6))
    tensors, _ = score_windows(model, input_ids)
    head_map = analyze_map(model, tensors)
    rows = validate_map(model, head_map, input_ids, shares=(0.5, 1.0), seeds=(0, 3))
    kinds = [(row.share, row.heads, row.choice, row.seed) for row in rows]
    assert kinds == [
        (0.0, 0, "none", None),
        *(
            (0.5, 9, choice, seed)
            for choice, seed in (("lowest", None), ("random", 0), ("random", 3), ("highest", None))
        ),
        *(
            (1.0, 18, choice, seed)
            for choice, seed in (("lowest", None), ("random", 0), ("random", 3), ("highest", None))
        ),
    ]

    def own_loss():
        with torch.no_grad():
            losses = [model(window[None], labels=window[None], use_cache=False).loss for window in input_ids]
        return torch.stack(losses).mean().item()

    assert rows[0].nll == pytest.approx(own_loss(), abs=1e-5)
    halves = {row.nll for row in rows[1:5]}
    assert len(halves) == 4 and all(abs(nll - rows[0].nll) > 1e-4 for nll in halves)
    # Without RoPE in every head the model is the one whose rotary embedding is the identity.
    still = lambda module, args, output: (torch.ones_like(output[0]), torch.zeros_like(output[1]))  # noqa: E731
    with model.model.rotary_emb.register_forward_hook(still):
        expected = own_loss()
    assert [row.nll for row in rows[5:]] == pytest.approx([expected] * 4, abs=1e-5)


def test_validation_of_a_folded_map_takes_whole_groups():
    model, input_ids = small_model(), torch.randint(256, (1, 50), generator=torch.Generator().manual_seed(7))
    head_map = analyze_map(model, score_windows(model, input_ids)[0])
    whole = validate_map(model, head_map.fold_to_groups(), input_ids, shares=(0.5,), seeds=())[1]
    # The same heads, by a map of query heads in which those of the lowest groups rank lowest.
    folded = head_map.fold_to_groups().rpd.repeat_interleave(HEADS // KV_HEADS, dim=1)
    by_heads = analyze_map(model, {"rpd": folded})
    assert whole.heads == 3 and whole.nll == validate_map(model, by_heads, input_ids, shares=(0.5,), seeds=())[1].nll


def analyze_map(model, tensors) -> HeadMap:
    metadata = {
        "model": "small",
        "revision": None,
        "model_type": "llama",
        "text_digest": None,
        "settings": {"divergence": "kl"},
        "granularity": "query_head",
        "folding": "mean",
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "training_length": 256,
        "source": "hf_hybrid",
    }
    return HeadMap(dict(tensors), metadata)


def test_a_saved_model_loads_with_its_tokenizer_in_evaluation_mode(checkpoint):
    model, tokenizer = load_source(checkpoint, dtype=torch.bfloat16)
    assert isinstance(model, LlamaForCausalLM) and not model.training and model.dtype == torch.bfloat16
    assert model.config._name_or_path == checkpoint.name
    assert tokenizer("Ab")["input_ids"] == byte_tokenizer()("Ab")["input_ids"]


def test_sources_that_cannot_be_used_are_named(checkpoint, tmp_path):
    config = LlamaConfig.from_pretrained(checkpoint)
    quantised = tmp_path / "quantised"
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(quantised)
    untokenized = tmp_path / "untokenized"
    small_model().save_pretrained(untokenized)
    empty = tmp_path / "empty"
    empty.mkdir()
    two = tmp_path / "two"
    two.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (two / name).write_bytes(b"GGUF")
    cases = [
        (quantised, {}, r"is quantised \(gptq\); use the unquantised checkpoint"),
        (untokenized, {}, "has no usable tokenizer"),
        (empty, {}, r"holds neither config.json nor a .gguf file"),
        (two, {}, r"holds 2 GGUF files; name one as the gguf file: a.gguf, b.gguf"),
        (two, {"gguf_file": "c.gguf"}, "holds no file 'c.gguf'"),
        (two / "a.gguf", {}, "cannot read the model"),
        (checkpoint / "config.json", {}, "is a file; a model is a folder, a hub id or a .gguf file"),
        (tmp_path / "absent", {}, "cannot read the model"),
        (checkpoint, {"device": "abacus"}, "device is 'abacus', which cannot be used here"),
        (checkpoint, {"device": "cuda:77"}, "device is 'cuda:77', which cannot be used here"),
    ]
    for model, options, message in cases:
        with pytest.raises(SourceError, match=message):
            load_source(model, **options)


def test_the_default_text_is_split_at_stated_tokens(monkeypatch):
    monkeypatch.setattr(text_data, "DOCUMENTED_MODULES", ("statistics", "json"))
    tokenizer, text, docstrings = byte_tokenizer(), text_data.load_text(), text_data.standard_library_docstrings()
    tokens = text_data.tokenize(tokenizer, text)
    heldout = text_data.heldout_windows(tokenizer)
    assert heldout.shape == (3, 1024)
    for window, start in zip(heldout, (60_000, 80_000, 100_000), strict=True):
        assert torch.equal(window, tokens[start : start + 1024])
    training = text_data.training_tokens(tokenizer)
    assert torch.equal(training, torch.cat((tokens[:60_000], text_data.tokenize(tokenizer, docstrings))))


def test_nothing_held_out_is_in_the_training_text():
    text, docstrings = text_data.load_text(), text_data.standard_library_docstrings()
    assert len(docstrings) > 500_000 and docstrings == text_data.standard_library_docstrings()
    heldout = text[len(text) // 2 :]
    repeated = sum(heldout[start : start + 150] in docstrings for start in range(0, len(heldout) - 150, 150))
    assert repeated == 0


def test_the_last_fifth_of_a_users_text_is_held_out(text_file):
    tokenizer = byte_tokenizer()
    tokens = text_data.tokenize(tokenizer, text_file.read_text())
    assert torch.equal(text_data.training_tokens(tokenizer, text_file), tokens[:1200])
    heldout = text_data.heldout_windows(tokenizer, text_file, length=70, count=4)
    assert torch.equal(heldout[0], tokens[1200:1270]) and torch.equal(heldout[-1], tokens[-70:])
    assert all((heldout[i, 0] == tokens[1200 + start]).item() for i, start in enumerate((0, 76, 153, 230)))
    with pytest.raises(SourceError, match="too short: 4 windows of 80 tokens need 320 tokens, it has 300"):
        text_data.heldout_windows(tokenizer, text_file, length=80, count=4)


def test_windows_begin_as_the_tokenizer_begins_texts():
    tokens = torch.arange(50)
    assert text_data.token_windows(tokens, 5, [7], tokenizer=byte_tokenizer()).tolist() == [[7, 8, 9, 10, 11]]
    assert text_data.token_windows(tokens, 5, [7], tokenizer=byte_tokenizer(bos=True)).tolist() == [[256, 7, 8, 9, 10]]
    with pytest.raises(SourceError, match="a window of 5 from 46 does not fit"):
        text_data.token_windows(tokens, 5, [0, 46])


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read the text"), (b" \n", "is empty"), (b"\xff\xfe\x00", "is not a UTF-8 text file")],
    ids=["absent", "empty", "binary"],
)
def test_unusable_texts_are_named(content, message, tmp_path):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SourceError, match=message):
        text_data.load_text(path)


def test_the_command_writes_the_map_and_says_what_it_found(checkpoint, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(text_data.heldout_windows, "__kwdefaults__", {"length": 64, "count": 3})
    out = tmp_path / "map.safetensors"
    sizes = ["--windows", "3", "--window-length", "64", "--queries", "8", "--text", str(text_file)]
    command = ["analyze", str(checkpoint), "--out", str(out), *sizes, "--validate"]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "140"})
    assert done.exit_code == 0, done.output
    for words in ("3 layers x 6", "GPBand", "retrieval heads", "random, seed 2", "25.0%", f"wrote {out}"):
        assert words in done.output.replace("\n", ""), words
    head_map = HeadMap.load(out)
    expected = analyze_heads(
        load_source(checkpoint)[0], byte_tokenizer(), text_file, windows=3, window_length=64, queries_per_window=8
    )
    assert torch.equal(head_map.rpd, expected.rpd) and head_map.metadata == expected.metadata | {
        "model": checkpoint.name
    }
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 1 and "exists" in again.output
