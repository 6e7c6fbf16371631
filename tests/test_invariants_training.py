"""Initial values, gradients, the Trainer and LoRA."""

import math

import pytest
import torch
from families import assert_same, build, configure, every_model, first_of_each_family, place, random_tokens
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

from hf_hybrid.attention import RMSNorm
from hf_hybrid.gated_delta_net import LogDecay
from hf_hybrid.titans import MemoryGates, NeuralMemory

LENGTHS = [5, 9, 12]


def gradients(model, **inputs):
    """Loss and gradients of one pass in training mode, in a fixed state of the random generator."""
    model.train().zero_grad()
    torch.manual_seed(3)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(actual, expected, tolerance=1e-4):
    """Equal losses, and equal gradients up to `tolerance` of each parameter's largest one."""
    assert_same(actual[0], expected[0], tolerance)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = (actual[1][name] - gradient).abs().max().item()
        # A gradient that is zero in exact arithmetic (a key bias of softmax attention) is rounding noise.
        assert error <= tolerance * max(gradient.abs().max().item(), 1e-2), (name, error)


def without_first_token(tokens, mask):
    """Labels as the sequences alone have them: nothing predicts a sequence's first token, nor padding."""
    is_first = mask.cumsum(dim=1) == 1
    return tokens.masked_fill((mask == 0) | is_first, -100)


@every_model
def test_fresh_parameters_have_their_documented_distribution(case):
    """Those of the decay are in the next test. A new kind of parameter must be described here."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configure(case))
    described = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(module_name, recurse=False):
            kind = name.rpartition(".")[2]
            if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv1d)) and kind == "weight":
                is_padded = isinstance(module, nn.Embedding) and module.padding_idx is not None
                drawn = parameter[1:] if is_padded else parameter
                spread = model.config.initializer_range
                if "o_proj" in name and model.config.model_type == "dual_stream":
                    spread /= math.sqrt(2 * model.config.num_hidden_layers)
                # Five standard errors of a sample of this size.
                assert drawn.mean().abs() < 5 * spread / math.sqrt(drawn.numel()), name
                assert abs(drawn.std() / spread - 1) < 5 / math.sqrt(2 * drawn.numel()), name
                if is_padded:
                    assert parameter[model.config.pad_token_id].eq(0).all(), name
            elif isinstance(module, nn.Linear) and kind == "bias":
                assert parameter.eq(0).all(), name
            elif isinstance(module, RMSNorm) or kind == "head_scale":
                assert parameter.eq(1).all(), name
            elif isinstance(module, NeuralMemory):
                # The memory keeps the size of what it reads.
                spread = parameter.shape[1] ** -0.5
                assert parameter.mean().abs() < 5 * spread / math.sqrt(parameter.numel()), name
                assert abs(parameter.std() / spread - 1) < 5 / math.sqrt(2 * parameter.numel()), name
            elif isinstance(module, MemoryGates):
                bound = {
                    "forgetting_bias": model.config.memory_forgetting,
                    "momentum_bias": model.config.memory_momentum,
                    "rate_bias": 0.5,
                }[kind]
                torch.testing.assert_close(parameter.sigmoid(), torch.full_like(parameter, bound))
            elif not isinstance(module, LogDecay):
                raise AssertionError(f"{name} has no documented distribution")
            described.add(name)
    assert described == {name for name, _ in model.named_parameters()}


@first_of_each_family
def test_fresh_decays_have_their_documented_distribution(case):
    """exp(A_log) is uniform and softplus(dt_bias) log-uniform, in the configuration's ranges."""
    ranges = {"linear_a_min": 0.5, "linear_a_max": 2.5, "linear_dt_min": 0.01, "linear_dt_max": 0.3}
    torch.manual_seed(0)
    models = [AutoModel.from_config(configure(case, **ranges)) for _ in range(40)]
    decays = [module for model in models for module in model.modules() if isinstance(module, LogDecay)]
    if not decays:
        pytest.skip("this family's first variant has no heads that decay by LogDecay")
    rates = torch.cat([decay.A_log for decay in decays]).exp()
    steps = nn.functional.softplus(torch.cat([decay.dt_bias for decay in decays])).log()
    for drawn, low, high in [(rates, 0.5, 2.5), (steps, math.log(0.01), math.log(0.3))]:
        assert drawn.min() >= low - 1e-4
        assert drawn.max() <= high + 1e-4
        # Kolmogorov-Smirnov: the distance exceeds 1.95 / sqrt(n) with probability 0.001.
        uniform = ((drawn - low) / (high - low)).sort().values
        distance = (uniform - (torch.arange(len(uniform)) + 0.5) / len(uniform)).abs().max()
        assert distance < 1.95 / math.sqrt(len(uniform))


@every_model
def test_every_parameter_gets_a_finite_gradient(case):
    tokens = random_tokens(3, 11)
    _, found = gradients(build(case), input_ids=tokens, labels=tokens)
    for name, gradient in found.items():
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


@every_model
@pytest.mark.parametrize("where", ["left", "right", "both"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_of_padded_rows(case, where, attention):
    """What stands at padded places changes no gradient, and a row of padding only leaves them finite."""
    model = build(case, attn_implementation=attention)
    sequences = [random_tokens(n, seed=n) for n in LENGTHS]
    tokens, mask, _ = place(sequences, 15, where)
    tokens, mask = torch.cat([tokens, random_tokens(1, 15)]), torch.cat([mask, torch.zeros_like(mask[:1])])
    padded = gradients(model, input_ids=tokens, attention_mask=mask, labels=without_first_token(tokens, mask))

    targets = sum(LENGTHS) - len(LENGTHS)
    parts = [gradients(model, input_ids=s[None], labels=s[None], num_items_in_batch=targets) for s in sequences]
    names = parts[0][1]
    alone = sum(loss for loss, _ in parts), {name: sum(part[name] for _, part in parts) for name in names}
    assert_same_gradients(padded, alone)


@every_model
@pytest.mark.parametrize("rows", ["plain", "padded", "packed"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing(case, rows, use_reentrant):
    model = build(case, attention_dropout=0.2)
    tokens, mask, _ = place([random_tokens(n, seed=n) for n in LENGTHS], 15, "left")
    inputs = {"input_ids": tokens, "labels": tokens}
    if rows == "padded":
        inputs = {"input_ids": tokens, "labels": without_first_token(tokens, mask), "attention_mask": mask}
    elif rows == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(7), torch.arange(8)])[None]
    passes, applications = [], getattr(model.config, "passes", 1)
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: passes.append(1))
    expected = gradients(model, **inputs)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same_gradients(gradients(model, **inputs), expected)
    # One pass without checkpointing, and two with it.
    assert len(passes) == 3 * applications


def training_arguments(folder, **options):
    defaults = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return TrainingArguments(str(folder), **{**defaults, **options})


def rows_of(**columns):
    """A dataset for the Trainer: one dictionary a row."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def make_task(task, rows=8, length=10):
    """Auto class and dataset of one task. Rows of the language-model task have unequal numbers of labels."""
    tokens = random_tokens(rows, length)
    if task == "causal":
        labels = tokens.masked_fill(torch.arange(length) < torch.arange(rows)[:, None], -100)
        return AutoModelForCausalLM, rows_of(input_ids=tokens, labels=labels)
    if task == "sequence":
        return AutoModelForSequenceClassification, rows_of(input_ids=tokens, labels=tokens[:, 3] % 4)
    return AutoModelForTokenClassification, rows_of(input_ids=tokens, labels=tokens % 4)


@first_of_each_family
@pytest.mark.parametrize("task", ["causal", "sequence", "token"])
def test_gradient_accumulation(case, task, tmp_path):
    """One step of gradient descent over 8 rows, at once and one by one."""
    auto_class, data = make_task(task)
    runs = []
    for accumulated in (1, 8):
        model = build(case, auto_class=auto_class, num_labels=4, classifier_dropout=0.0)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        arguments = training_arguments(
            tmp_path,
            per_device_train_batch_size=8 // accumulated,
            gradient_accumulation_steps=accumulated,
            max_steps=1,
            max_grad_norm=0.0,
            optim="sgd",
            learning_rate=1.0,
            logging_steps=1,
        )
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
        change = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
        # The log rounds the loss.
        runs.append((torch.tensor(trainer.state.log_history[0]["loss"]), change))
    assert_same_gradients(runs[1], runs[0])


@first_of_each_family
def test_trainer(case, tmp_path):
    """train, evaluate with metrics, predict, and the saved model."""
    _, data = make_task("causal", rows=6)
    model = build(case)
    arguments = training_arguments(
        tmp_path,
        per_device_train_batch_size=6,
        per_device_eval_batch_size=4,
        max_steps=30,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        # The cache is among the outputs, and must not be gathered with the predictions.
        use_cache=True,
    )

    def accuracy(prediction):
        predicted, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
        return {"accuracy": (predicted == labels)[labels != -100].mean()}

    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=accuracy)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.3 * before["eval_loss"]
    assert after["eval_accuracy"] > 0.9 > before["eval_accuracy"]

    predictions = trainer.predict(data).predictions
    assert predictions.shape == (6, 10, model.config.vocab_size)
    trainer.save_model()
    tokens = torch.stack([row["input_ids"] for row in data])
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits
    assert_same(again, torch.from_numpy(predictions))


def linear_names(layer):
    """Last name parts of the linear maps of a layer."""
    return {name.rpartition(".")[2] for name, module in layer.named_modules() if isinstance(module, nn.Linear)}


def adapt(model, targets):
    """A LoRA model whose adapters are not zero at the start, and whose decays are fast enough for theirs to matter."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            nn.init.zeros_(parameter)
    return get_peft_model(model, LoraConfig(target_modules=targets, r=3, init_lora_weights=False)).eval()


@every_model
def test_lora_targets_reach_every_linear_map(case):
    model = build(case)
    targets = model.config.lora_target_modules
    expected = [linear_names(layer) for layer in model.model.layers]
    adapted = adapt(model, targets)
    for layer, names in zip(adapted.base_model.model.model.layers, expected, strict=True):
        assert names
        reached = {name.split(".")[-2] for name, _ in layer.named_modules() if name.endswith("lora_A")}
        assert reached == names <= set(targets)


@first_of_each_family
def test_every_lora_target_exists(case):
    assert set(configure(case).lora_target_modules) == linear_names(build(case).model.layers)


@every_model
def test_lora_changes_the_output_and_merges(case):
    tokens = random_tokens(2, 9)
    for target in linear_names(build(case).model.layers):
        model = build(case)
        adapted = adapt(model, [target])
        _, found = gradients(adapted, input_ids=tokens, labels=tokens)
        trained = [gradient for name, gradient in found.items() if "lora_" in name]
        assert trained, target
        assert all(gradient.any() for gradient in trained), target
        with torch.no_grad():
            changed = adapted.eval()(tokens).logits
            with adapted.disable_adapter():
                plain = adapted(tokens).logits
            merged = adapted.merge_and_unload()(tokens).logits
        assert (changed - plain).abs().max() > 1e-3 * plain.abs().max(), target
        assert_same(merged, changed)
