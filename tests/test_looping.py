"""Training-free looping: the damped formula, a cache without traces, generation, and what is refused."""

import json

import pytest
import torch
from families import assert_same, build, place, random_tokens
from tiny_tokenizer import save_tiny_tokenizer
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)
from typer.testing import CliRunner

from hf_hybrid.cli.main import app
from hf_hybrid.conversion.looping import evaluate_loops, loop_layers, middle_windows

SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
    # Every second layer has a window, so layers of one loop have masks of their own.
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SIZES, sliding_window=4)),
}
SOFTMAX = [*MODELS, "hwh-transformer"]
WINDOWS = {"hwh-transformer": (1, 3), "hwh-headwise": (0, 2), "hwh-gdn": (0, 2)}
every_softmax_model = pytest.mark.parametrize("name", SOFTMAX)
every_model_name = pytest.mark.parametrize("name", [*SOFTMAX, "hwh-headwise", "hwh-gdn"])


def small(name):
    if name.startswith("hwh"):
        return build(tuple(name.split("-")))
    torch.manual_seed(0)
    model_class, config = MODELS[name]
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3 if "embed" not in parameter_name else 1.0)
    return model


def loop(model, name, **options):
    return loop_layers(model, *WINDOWS.get(name, (2, 5)), **{"steps": 3, "beta": 0.4, **options})


def logits_of(model, tokens, **arguments):
    with torch.no_grad():
        return model(tokens, **arguments).logits


def llama_window(model, states, keys_of):
    """Layers 2 to 4 of a Llama written out; layer n attends to keys and values of the input `keys_of[n]`."""
    length = states.shape[1]
    cos, sin = model.model.rotary_emb(states, torch.arange(length)[None])
    mask = torch.full((length, length), -torch.inf, dtype=states.dtype).triu(1)
    inputs = []

    def turn(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    for number, layer in enumerate(model.model.layers[2:5]):
        inputs.append(states)
        attention = layer.self_attn
        normed = layer.input_layernorm(states)
        remembered = layer.input_layernorm(states if keys_of is None else keys_of[number])
        query = turn(attention.q_proj(normed).unflatten(-1, (4, 8)).transpose(1, 2))
        key = turn(attention.k_proj(remembered).unflatten(-1, (2, 8)).transpose(1, 2)).repeat_interleave(2, 1)
        value = attention.v_proj(remembered).unflatten(-1, (2, 8)).transpose(1, 2).repeat_interleave(2, 1)
        weights = (query @ key.transpose(-1, -2) / 8**0.5 + mask).softmax(-1)
        states = states + attention.o_proj((weights @ value).transpose(1, 2).flatten(2))
        states = states + layer.mlp(layer.post_attention_layernorm(states))
    return states, inputs


@pytest.mark.parametrize("rule", ["damped", "naive"])
def test_the_formula_written_out(rule):
    model, tokens = small("llama").double(), random_tokens(2, 9)
    with torch.no_grad():
        x0 = model.model(tokens, output_hidden_states=True).hidden_states[2]
        first, keys_of = llama_window(model, x0, None)
        if rule == "damped":
            x1 = 2 / 3 * x0 + first / 3
            x2 = 2 / 3 * x1 + llama_window(model, x1, keys_of)[0] / 3
            x3 = 2 / 3 * x2 + llama_window(model, x2, keys_of)[0] / 3
            expected = 0.4 * first + 0.6 * x3
        else:
            expected = llama_window(model, llama_window(model, first, keys_of)[0], keys_of)[0]
        handle = loop(model, "llama", rule=rule)
        found = model.model(tokens, output_hidden_states=True, use_cache=False).hidden_states[5]
        handle.remove()
    assert_same(found, expected, tolerance=1e-12)


@every_model_name
def test_one_step_is_the_plain_model_and_removal_gives_it_back(name):
    model, tokens = small(name), random_tokens(2, 11)
    plain, names = logits_of(model, tokens), list(model.state_dict())
    with loop(model, name, steps=1):
        assert_same(logits_of(model, tokens), plain)
    with loop(model, name, beta=1.0):
        assert_same(logits_of(model, tokens), plain)
    with loop(model, name):
        assert (logits_of(model, tokens) - plain).abs().max() > 1e-2
        assert list(model.state_dict()) == names
    assert torch.equal(logits_of(model, tokens), plain)


@every_softmax_model
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("rule", ["damped", "naive"])
def test_chunks_and_decoding_equal_one_pass_without_a_cache(name, kind, rule):
    model, tokens = small(name), random_tokens(2, 16)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=20)
    with loop(model, name, rule=rule):
        expected = logits_of(model, tokens, use_cache=False)
        pieces = [logits_of(model, part, cache=cache) for part in tokens.split([5, 1, 7, 1, 1, 1], dim=1)]
    assert_same(torch.cat(pieces, dim=1), expected)


@every_model_name
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_loop_passes_leave_no_trace_in_the_cache(name, kind):
    """Up to the end of the window the cache is the plain model's; behind it, it is as large."""
    model, tokens, caches = small(name), random_tokens(2, 12), []
    for looped in (False, True):
        cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=20)
        handle = loop(model, name) if looped else None
        for part in tokens.split([6, 1, 5], dim=1):
            logits_of(model, part, cache=cache)
        if handle is not None:
            handle.remove()
        caches.append(cache)
    end, compared = WINDOWS.get(name, (2, 5))[1], 0
    for number, (plain, looped) in enumerate(zip(caches[0].layers, caches[1].layers, strict=True)):
        for attribute, value in vars(plain).items():
            other = vars(looped)[attribute]
            if isinstance(value, dict):
                value, other = value[0], other[0]
            if isinstance(value, torch.Tensor):
                assert value.shape == other.shape
                if number < end and value.numel():
                    assert_same(other, value)
                    compared += 1
    assert compared >= 2 * end
    assert "update" not in vars(caches[1])


@every_softmax_model
def test_generation_equals_full_passes_and_left_padded_batches(name):
    model = small(name)
    sequences = [random_tokens(n, seed=n) for n in (5, 9, 13)]
    tokens, mask, _ = place(sequences, 13, "left")
    options = {"max_new_tokens": 6, "do_sample": False}
    with loop(model, name):
        batch = model.generate(tokens, attention_mask=mask, **options)[:, 13:]
        for row, sequence in enumerate(sequences):
            single = model.generate(sequence[None], **options)[0]
            assert torch.equal(batch[row], single[len(sequence) :])
            full = logits_of(model, single[None], use_cache=False)[0]
            assert torch.equal(full[len(sequence) - 1 : -1].argmax(-1), single[len(sequence) :])


@pytest.mark.parametrize("name", ["hwh-headwise", "hwh-gdn"])
def test_recurrent_heads_generate_alike_in_batches(name):
    model = small(name)
    sequences = [random_tokens(n, seed=n) for n in (5, 9, 13)]
    tokens, mask, _ = place(sequences, 13, "left")
    options = {"max_new_tokens": 6, "do_sample": False}
    with loop(model, name):
        batch = model.generate(tokens, attention_mask=mask, **options)[:, 13:]
        for row, sequence in enumerate(sequences):
            assert torch.equal(batch[row], model.generate(sequence[None], **options)[0, len(sequence) :])


def test_beams_and_a_lazily_made_cache():
    model, tokens = small("qwen3"), random_tokens(2, 7)
    with loop(model, "qwen3"):
        beams = model.generate(tokens, max_new_tokens=5, do_sample=False, num_beams=3)
        single = model.generate(tokens[:1], max_new_tokens=5, do_sample=False, num_beams=3)
        assert torch.equal(beams[:1], single)
        assert_same(logits_of(model, tokens, cache=DynamicCache()), logits_of(model, tokens, use_cache=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 4, "end": 4}, "the window is 4:4"),
        ({"start": 2, "end": 7}, "the window is 2:7, but the model has the layers 0:6"),
        ({"start": -1, "end": 2}, "the window is -1:2"),
        ({"start": 2, "end": 4, "steps": 0}, "steps is 0"),
        ({"start": 2, "end": 4, "beta": 1.5}, "beta is 1.5"),
        ({"start": 2, "end": 4, "rule": "twice"}, "rule is 'twice'"),
    ],
    ids=str,
)
def test_settings_are_refused_by_name(arguments, message):
    model = small("llama")
    with pytest.raises(ValueError, match=message):
        loop_layers(model, **arguments)
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_a_layer_is_in_one_loop_only():
    model = small("llama")
    with loop_layers(model, 1, 3), pytest.raises(ValueError, match="layer 2 is in a loop already"):
        loop_layers(model, 2, 5)


def test_windows_of_the_paper():
    """Layers 12 to 15 of 28 (Qwen3-1.7B) and 15 to 18 of 36 (Qwen3-4B) are among the default ones."""
    assert (12, 16) in middle_windows(28)
    assert (15, 19) in middle_windows(36)
    with pytest.raises(ValueError, match="no window of 4 layers"):
        middle_windows(3)


def test_scores_of_settings():
    model = small("llama")
    scores = list(evaluate_loops(model, random_tokens(2, 70), [((2, 5), 1, "damped"), ((2, 5), 3, "naive")]))
    assert [(score.window, score.steps, score.rule) for score in scores] == [
        (None, 1, "plain"),
        ((2, 5), 1, "damped"),
        ((2, 5), 3, "naive"),
    ]
    assert abs(scores[0].nll - scores[1].nll) < 1e-5
    assert abs(scores[0].nll - scores[2].nll) > 1e-3


def test_command(tmp_path):
    folder = tmp_path / "model"
    LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 600})).save_pretrained(folder)
    save_tiny_tokenizer(folder)
    arguments = ["loop", str(folder), "--windows", "1:3,2:4", "--steps", "2", "--rule", "damped", "--rule", "naive"]
    small_text = ["--length", "64", "--copy-distance", "70", "--out", str(tmp_path / "loop.json")]
    result = CliRunner().invoke(app, [*arguments, *small_text])
    assert result.exit_code == 0, result.output
    scores = json.loads((tmp_path / "loop.json").read_text())["scores"]
    assert [(score["window"], score["rule"]) for score in scores] == [
        (None, "plain"),
        *(([start, start + 2], rule) for rule in ("damped", "naive") for start in (1, 2)),
    ]
    for wrong, message in ((["--windows", "1-3"], "windows has '1-3'"), (["--steps", "0"], "steps has '0'")):
        result = CliRunner().invoke(app, ["loop", str(folder), *wrong])
        assert result.exit_code == 1
        assert message in result.output
    again = CliRunner().invoke(app, [*arguments, *small_text])
    assert again.exit_code == 1
    assert "--overwrite" in again.output
