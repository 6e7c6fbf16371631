"""Calibration and alignment: closed forms against float64 references, resuming, and the commands end to end."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_hybrid.cli.main import app
from hf_hybrid.conversion import measure
from hf_hybrid.conversion.calibrate import CalibrateSettings, Moments, calibrate, fit_head_gains, ridge
from hf_hybrid.conversion.convert import convert
from hf_hybrid.conversion.distill import AlignSettings, align
from hf_hybrid.conversion.healing import HealingError, load_exact, load_hybrid, load_pair
from hf_hybrid.conversion.layerwise import LayerRunner, walk_layers
from hf_hybrid.conversion.source_model import SourceError

HEADS = [[0, 1], [], [2, 3, 4, 5]]
ALL = [list(range(6))] * 3


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A random Llama of three layers with a word-level tokenizer."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=91,
        hidden_size=48,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    vocabulary = {f"w{number}": number for number in range(91)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def raw(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "raw"
    convert(source, folder, heads=HEADS)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """3,000 words; a word often follows from the one before, so that there is something to learn."""
    generator = torch.Generator().manual_seed(3)
    words, word = [], 5
    for _ in range(3000):
        noise = int(torch.randint(91, (1,), generator=generator))
        word = (7 * word + 3) % 91 if noise % 3 else noise
        words.append(f"w{word}")
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(words))
    return path


def random_rows(rows=9, length=20, seed=1):
    return torch.randint(91, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_ridge_minimises_the_weighted_error():
    generator = torch.Generator().manual_seed(0)
    features, targets = (torch.randn(37, size, generator=generator) for size in (7, 5))
    start = torch.randn(5, 7, generator=generator)
    weights = torch.ones(37).double()
    weights[:4] = 20
    moments = Moments.empty(7, 5)
    moments.add(features[:4], targets[:4], 20.0)
    moments.add(features[4:], targets[4:])
    solution = ridge(moments, start, 1e-2)
    penalty = 1e-2 * (weights[:, None] * features.double().pow(2)).sum() / 7
    rows = torch.cat([features.double() * weights.sqrt()[:, None], penalty.sqrt() * torch.eye(7).double()])
    goals = torch.cat([targets.double() * weights.sqrt()[:, None], penalty.sqrt() * start.double().T])
    torch.testing.assert_close(solution, torch.linalg.lstsq(rows, goals).solution.T, atol=1e-5, rtol=1e-5)
    missed = (weights[:, None] * (features.double() @ solution.T - targets).pow(2)).sum()
    assert moments.error(solution) == pytest.approx((missed / moments.energy).item(), rel=1e-5)


def test_head_gains_are_recovered_beside_heads_that_stay():
    generator = torch.Generator().manual_seed(0)
    features, weight = torch.randn(400, 9, generator=generator), torch.randn(6, 9, generator=generator)
    blocks, gains = [slice(0, 2), slice(2, 6), slice(6, 9)], torch.tensor([3.0, 1.0, 0.2])
    factors = torch.cat([gain.expand(block.stop - block.start) for gain, block in zip(gains, blocks, strict=True)])
    moments = Moments.empty(9, 6)
    moments.add(features, features * factors @ weight.T)
    found = fit_head_gains(moments, weight, blocks, [0, 2])
    torch.testing.assert_close(found.float(), gains, atol=1e-3, rtol=1e-3)


def test_the_walk_sees_what_the_running_source_sees(source):
    exact, plain = load_exact(source), AutoModelForCausalLM.from_pretrained(source)
    seen = []
    for layer in plain.model.layers:
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, output: seen.append((kwargs["hidden_states"], output[0])), with_kwargs=True
        )
    rows, starts = random_rows(), torch.arange(4)[:, None]
    with torch.no_grad():
        plain(rows)
    for (layer, (group, _)), (inputs, output) in zip(walk_layers(exact, [rows, starts]), seen, strict=True):
        torch.testing.assert_close(group.inputs, inputs, atol=1e-4, rtol=1e-4, msg=f"layer {layer}")
        torch.testing.assert_close(group.targets, output, atol=1e-4, rtol=1e-4)


def test_calibrating_the_source_itself_changes_nothing(source):
    exact, same = load_exact(source), load_exact(source)
    errors = calibrate(exact, same, random_rows(), torch.arange(5))
    assert max(after for _, after in errors) < 1e-6
    for name, parameter in exact.named_parameters():
        torch.testing.assert_close(same.get_parameter(name), parameter, atol=1e-4, rtol=1e-3)


def test_calibration_lowers_the_error_and_keeps_first_tokens(source, raw):
    exact, hybrid = load_exact(source), load_hybrid(raw)
    untouched = {name: value.clone() for name, value in hybrid.named_parameters() if "o_proj" not in name}
    errors = calibrate(exact, hybrid, random_rows(24, 30), torch.arange(91), CalibrateSettings(start_weight=1e4))
    assert all(after < before for before, after in errors)
    changed = {
        name for name, value in hybrid.named_parameters() if name in untouched and not value.equal(untouched[name])
    }
    assert all(name.endswith("head_scale") for name in changed)
    assert measure.sink_share(exact, hybrid, torch.arange(91)) == 1.0


def test_alignment_improves_on_calibration(source, raw):
    exact, rows, starts = load_exact(source), random_rows(64, 32), torch.arange(91)
    closed_form = calibrate(exact, load_hybrid(raw), rows, starts)
    trained = align(exact, load_hybrid(raw), rows, starts, AlignSettings(epochs=2))
    for (_, ridge_error), (_, error) in zip(closed_form, trained, strict=True):
        assert error < 0.9 * ridge_error


class Stop(Exception):
    pass


def test_alignment_resumes_with_the_same_result(source, raw, tmp_path):
    exact, rows, starts = load_exact(source), random_rows(8, 16), torch.arange(7)
    settings = AlignSettings()
    whole = load_hybrid(raw)
    errors = align(exact, whole, rows, starts, settings)

    def stop_after_the_second(layer, before, after):
        if layer == 1:
            raise Stop

    with pytest.raises(Stop):
        align(exact, load_hybrid(raw), rows, starts, settings, checkpoint=tmp_path, progress=stop_after_the_second)
    resumed = load_hybrid(raw)
    assert align(exact, resumed, rows, starts, settings, checkpoint=tmp_path) == errors
    for name, parameter in whole.named_parameters():
        assert torch.equal(resumed.get_parameter(name), parameter), name
    with pytest.raises(HealingError, match="other settings"):
        align(exact, load_hybrid(raw), rows, starts, AlignSettings(seed=1), checkpoint=tmp_path)
    with pytest.raises(HealingError, match="other sequences, start_tokens"):
        align(exact, load_hybrid(raw), rows.flip(0), starts.flip(0), settings, checkpoint=tmp_path)
    with torch.no_grad():
        weight = exact.model.layers[2].token_mixer.o_proj.weight
        weight[:2] = weight[:2].flip(0)
    with pytest.raises(HealingError, match="other source"):
        align(exact, load_hybrid(raw), rows, starts, settings, checkpoint=tmp_path)


def test_the_commands_end_to_end(source, raw, text, tmp_path):
    def run(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.output

    options = ("--text", text, "--tokens", 640, "--length", 32, "--starts", 20)
    assert "missed" in run("calibrate", raw, source, tmp_path / "calibrated", *options)
    run("distill", tmp_path / "calibrated", source, tmp_path / "aligned", "--stage", "align", *options)
    stages = json.loads((tmp_path / "aligned" / "healing.json").read_text())
    assert [stage["stage"] for stage in stages] == ["calibrate", "align"]
    assert not (tmp_path / "aligned.align").exists()
    assert "## Stage: align" in (tmp_path / "aligned" / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "aligned")
    before = load_file(
        raw / "model.safetensors" if (raw / "model.safetensors").exists() else next(raw.glob("*.safetensors"))
    )
    assert before.keys() == {name for name in model.state_dict() if name != "lm_head.weight"}
    assert model(random_rows()).logits.isfinite().all()


def refused(message, *arguments):
    """Runs a command that must end with one line that says `message`."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 1, result.output
    assert message in " ".join(result.output.split()), result.output


@pytest.mark.parametrize("command", ["calibrate", "distill"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tokens", 10, "at least one row"),
        ("--tokens", 10**6, "training tokens"),
        ("--length", 1, "length is 1"),
        ("--length", 0, "length is 0"),
        ("--starts", 0, "starts is 0"),
        ("--starts", -1, "starts is -1"),
        ("--ridge", "nan", "ridge is nan"),
        ("--ridge", 0, "ridge is 0"),
        ("--start-weight", "inf", "start_weight is inf"),
        ("--start-weight", -1, "start_weight is -1"),
        ("--text", "nowhere.txt", "nowhere.txt"),
    ],
)
def test_bad_input_is_named_before_anything_is_written(source, raw, text, tmp_path, command, option, value, message):
    refused(message, command, raw, source, tmp_path / "out", "--text", text, "--length", 64, option, value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--epochs", 0, "epochs is 0"),
        ("--batch-rows", -2, "batch_rows is -2"),
        ("--learning-rate", "nan", "learning_rate is nan"),
        ("--learning-rate", -1e-3, "learning_rate is -0.001"),
    ],
)
def test_bad_settings_of_the_descent_are_named(source, raw, text, tmp_path, option, value, message):
    refused(message, "distill", raw, source, tmp_path / "out", "--text", text, option, value)
    assert list(tmp_path.iterdir()) == []


def weights_of(folder):
    (path,) = folder.glob("*.safetensors")
    return path, load_file(path)


def test_a_source_of_the_same_sizes_is_not_mistaken_for_the_right_one(source, raw, text, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(source, other)
    path, weights = weights_of(other)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
    save_file(weights, path, metadata={"format": "pt"})
    options = ("--text", text, "--tokens", 64, "--length", 32)
    refused("differ in model.layers.1.mlp.up_proj.weight", "calibrate", raw, other, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_an_incomplete_hybrid_is_refused(source, raw, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(raw, broken)
    path, weights = weights_of(broken)
    taken = weights.pop("model.layers.2.token_mixer.o_proj.weight")
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"lacks 1 .* first 'model.layers.2.token_mixer.o_proj.weight'"):
        load_pair(broken, source)
    save_file({**weights, "model.layers.2.token_mixer.o_proj.weight": taken[:-1].clone()}, path)
    with pytest.raises(SourceError, match="broken"):
        load_pair(broken, source)


def test_results_that_are_not_finite_are_not_written(source, raw, text, tmp_path):
    names = {}
    for name, folder in (("source", source), ("raw", raw)):
        names[name] = tmp_path / name
        shutil.copytree(folder, names[name])
        path, weights = weights_of(names[name])
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("inf")
        save_file(weights, path, metadata={"format": "pt"})
    options = ("--text", text, "--tokens", 64, "--length", 32, "--starts", 4)
    refused("not finite", "calibrate", names["raw"], names["source"], tmp_path / "out", *options)
    assert {path.name for path in tmp_path.iterdir()} == set(names)


def test_what_lies_in_the_way_is_left_alone(source, raw, text, tmp_path):
    foreign = tmp_path / "out.align" / "diary.txt"
    foreign.parent.mkdir()
    foreign.write_text("mine")
    options = ("--text", text, "--tokens", 64, "--length", 32, "--starts", 4)
    refused("is not a folder of finished layers", "distill", raw, source, tmp_path / "out", *options)
    refused("is a file", "calibrate", raw, source, foreign / "out", *options)
    assert foreign.read_text() == "mine" and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("{}", "must hold a JSON array")])
def test_a_broken_record_is_refused_first(source, raw, text, tmp_path, content, message):
    broken = tmp_path / "broken"
    shutil.copytree(raw, broken)
    (broken / "healing.json").write_text(content)
    options = ("--text", text, "--tokens", 64, "--length", 32)
    refused(message, "calibrate", broken, source, tmp_path / "out", *options)


def test_every_tensor_keeps_the_dtype_it_is_stored_in(source, text, tmp_path):
    """Decay parameters are float32 in a model of any dtype, and would lose by rounding."""
    convert(source, tmp_path / "half", heads=HEADS, dtype=torch.bfloat16)
    options = ("--text", text, "--tokens", 64, "--length", 32, "--starts", 4)
    result = CliRunner().invoke(app, [*map(str, ["calibrate", tmp_path / "half", source, tmp_path / "out", *options])])
    assert result.exit_code == 0, result.output
    (_, before), (_, after) = weights_of(tmp_path / "half"), weights_of(tmp_path / "out")
    assert {name: value.dtype for name, value in after.items()} == {name: value.dtype for name, value in before.items()}
    assert after["model.layers.0.token_mixer.linear_attention.decay.dt_bias"].dtype == torch.float32
    name = "model.layers.0.token_mixer.linear_attention.decay.dt_bias"
    assert after[name].equal(before[name])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_other_models_and_existing_folders_are_refused(source, raw, tmp_path):
    with pytest.raises(HealingError, match="holds a llama model"):
        load_hybrid(source)
    with pytest.raises(HealingError, match=r"no config\.json"):
        load_hybrid(tmp_path)
    other = tmp_path / "other"
    config = LlamaConfig.from_pretrained(source, num_hidden_layers=2)
    LlamaForCausalLM(config).save_pretrained(other)
    with pytest.raises(HealingError, match="num_hidden_layers 3"):
        load_pair(raw, other)
    result = CliRunner().invoke(app, ["calibrate", str(raw), str(source), str(tmp_path)])
    assert result.exit_code == 1 and "not overwritten" in result.output


def test_measures_on_models_whose_answer_is_known(source):
    exact = load_exact(source)
    uniform = load_exact(source)
    with torch.no_grad():
        uniform.model.norm.weight.zero_()
    assert measure.heldout_nll(uniform, random_rows()) == pytest.approx(torch.tensor(91.0).log().item(), abs=1e-5)
    recall = measure.repeated_span(uniform, torch.arange(91), (64,), samples=2)[0]
    assert recall.loss == pytest.approx(torch.tensor(91.0).log().item(), abs=1e-5)
    assert measure.sink_share(exact, exact, torch.arange(9)) == 1.0
    shrunk = load_exact(source)
    with torch.no_grad():
        for parameter in shrunk.model.embed_tokens.parameters():
            parameter.mul_(1e-3)
        for layer in shrunk.model.layers:
            layer.token_mixer.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    assert measure.sink_share(exact, shrunk, torch.arange(9)) == 0.0
    assert measure.decode_speed(exact, 64, steps=3) > 0


def test_the_runner_gives_heads_in_original_order(raw):
    hybrid = load_hybrid(raw)
    runner, rows = LayerRunner(hybrid), torch.randn(2, 5, 48)
    with torch.no_grad():
        heads = runner.heads(0, rows)
        torch.testing.assert_close(
            hybrid.model.layers[0].token_mixer.o_proj(heads), runner.mixer(0, rows), atol=1e-6, rtol=1e-6
        )
    assert heads.shape == (2, 5, 48)
