"""Hope's continuum memory: its chain and widths, and the cadence of its levels under the Trainer."""

import pytest
import torch
from families import assert_same, build, random_tokens
from huggingface_hub.errors import StrictDataclassError
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from hf_hybrid import TLMConfig
from hf_hybrid.continuum_memory import level_widths
from hf_hybrid.training.cadence import CadenceCallback, parameters_with_periods

HOPE = ("tlm", "hope")


class Rows(Dataset):
    def __init__(self, count):
        self.tokens = random_tokens(count, 9)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def train(model, folder, steps, resume=None, **options):
    """SGD, one row a step, in order."""
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=1,
        max_steps=steps,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_only_model=False,
        **options,
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    trainer = Trainer(
        model, arguments, train_dataset=Rows(8), optimizers=(optimizer, None), callbacks=[CadenceCallback()]
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train(resume_from_checkpoint=resume)
    return model


def slow_parameters(model):
    return {name: parameter for name, parameter, _ in parameters_with_periods(model)}


def test_the_levels_are_a_chain_as_wide_as_the_mlp():
    model = build(HOPE)
    for layer, width in zip(model.model.layers, (84, 56, 28), strict=True):
        first, second, third = layer.mlp.levels
        assert sum(level.up_proj.out_features for level in layer.mlp.levels) == width
        hidden = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            once = first(hidden)
            twice = once + second(once)
            assert layer.mlp(hidden).equal(twice + third(twice))
    assert level_widths(11, 3) == [4, 4, 3]
    assert model.num_parameters() == build(("tlm", "attention"), qk_norm=False).num_parameters()


def test_levels_step_when_they_are_due(tmp_path):
    model = build(HOPE)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, tmp_path, 3, save_strategy="no")
    moved = {name: not parameter.equal(start[name]) for name, parameter in model.named_parameters()}
    for name in moved:
        # After 3 steps: the levels of period 1 and 2 have stepped, that of 4 has not.
        assert moved[name] == (".levels.2." not in name), name


def test_with_sgd_the_cadence_is_the_summed_batch(tmp_path):
    """Only the slowest level is trained, so its four gradients are taken at the same weights."""
    model, expected = build(HOPE), build(HOPE)
    for each in (model, expected):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(".levels.2." in name)
    train(model, tmp_path, 4, save_strategy="no")
    for row in Rows(8).tokens[:4]:
        expected(row[None], labels=row[None]).loss.backward()
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if parameter.requires_grad:
                assert_same(model.get_parameter(name), parameter - 0.1 * parameter.grad)


def test_a_resumed_run_has_what_was_held_back(tmp_path):
    straight = train(build(HOPE), tmp_path / "straight", 4, save_strategy="no")
    train(build(HOPE), tmp_path / "broken", 3, save_strategy="steps", save_steps=3)
    folder = tmp_path / "broken"
    resumed = train(build(HOPE, seed=1), folder, 4, resume=str(folder / "checkpoint-3"), save_strategy="no")
    for (name, actual), (_, expected) in zip(resumed.named_parameters(), straight.named_parameters(), strict=True):
        assert_same(actual, expected), name
    assert all(".levels.1." in name or ".levels.2." in name for name in slow_parameters(resumed))


def test_a_model_without_levels_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no continuum memory"):
        train(build(("tlm", "attention")), tmp_path, 1, save_strategy="no")


@pytest.mark.parametrize("periods", [[], [0, 1], [4, 1], [1] * 40], ids=str)
def test_periods_are_checked(periods):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    with pytest.raises((ValueError, StrictDataclassError), match="cms_periods"):
        TLMConfig(**sizes, token_mixer="hope", cms_periods=periods)
