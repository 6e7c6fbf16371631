"""Shared prefixes: the tree, and answers that are those of every request read by itself."""

import random

import pytest
import torch
from byte_tokenizer import SPECIAL, VOCAB_SIZE, byte_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_hybrid import DualStreamConfig, HwHConfig, MobiusConfig, TLMConfig
from hf_hybrid.eval.prefix_sharing import Branch, SharedPrefixLM, prefix_tree, tokens_read

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 6,
    **SPECIAL,
}
LINEAR = {
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
CONFIGS = {
    "llama": lambda: CONFIG_MAPPING["llama"](**SIZES),
    "mistral-window": lambda: CONFIG_MAPPING["mistral"](**SIZES, sliding_window=7),
    "olmo_hybrid": lambda: CONFIG_MAPPING["olmo_hybrid"](**SIZES, **LINEAR),
    "hwh": lambda: HwHConfig(**SIZES, full_attention_heads=[[0, 1], [], [2, 3, 4, 5]]),
    "hwh-linear": lambda: HwHConfig(**SIZES, full_attention_heads=[[], [], []]),
    "tlm-mag": lambda: TLMConfig(
        **SIZES,
        token_mixer="titans",
        memory_chunk_size=8,
        memory_max_rate=1e-3,
        sliding_window=7,
        mlp_taper={"multiple_of": 2},
    ),
    "tlm-lmm": lambda: TLMConfig(
        **SIZES, token_mixer="titans", memory_variant="lmm", memory_chunk_size=5, memory_max_rate=1e-3, mlp_taper=None
    ),
    "mobius": lambda: MobiusConfig(**SIZES, num_block_groups=3, passes=2, start_group=1),
    "dual-stream": lambda: DualStreamConfig(**SIZES, prediction_window=5),
    "query-only": lambda: DualStreamConfig(**SIZES, stream_mode="query_only"),
}
SHARPER = {"tlm-mag": 6, "tlm-lmm": 6, "dual-stream": 12, "query-only": 12}


def small_model(name: str):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Sharp enough for the answers to differ.
            parameter.mul_(SHARPER.get(name, 3) if parameter.dim() > 1 else 1)
    return model


def language_model(kind: type[HFLM], model, batch_size: int, **options) -> HFLM:
    return kind(
        pretrained=model, tokenizer=byte_tokenizer(), batch_size=batch_size, max_length=512, device="cpu", **options
    )


def prompts() -> list[str]:
    """Two haystacks with several questions, needles that part at different places, and a prompt on its own."""
    letters = random.Random(4)
    text = ["".join(letters.choices("abcdef ghij", k=length)) for length in (90, 70)]
    shared = [text[0] + ending for ending in (" q?", " which?", " r?", text[1] + " q?", text[1] + " what?")]
    return [*shared, "alone, without company", text[1] + " q?", text[1] + "!", text[1] + " q?"]


def generation(**options) -> list[Instance]:
    arguments = {"until": ["zz"], "max_gen_toks": 7, "do_sample": False, **options}
    return [
        Instance(request_type="generate_until", doc={}, arguments=(prompt, dict(arguments)), idx=0)
        for prompt in prompts()
    ]


def scoring() -> list[Instance]:
    answers = (" a", " bcd", " efghij")
    return [
        Instance(request_type="loglikelihood", doc={}, arguments=(prompt, answer), idx=0)
        for prompt in prompts()
        for answer in answers
    ]


def test_prefix_tree():
    rows = [[1] * 40 + [2, 3], [1] * 40 + [2, 4], [1] * 40 + [5] * 50 + [6], [1] * 40 + [5] * 50, [9], [7] * 5, [7] * 6]
    tree = prefix_tree(rows, shortest=10)
    inner = Branch(40, 90, members=[3, 2])
    assert tree == Branch(0, 0, members=[5, 6, 4], children=[Branch(0, 40, members=[0, 1], children=[inner])])
    assert tokens_read(tree, rows) == 40 + 2 + 2 + 50 + 1 + 0 + 1 + 5 + 6
    assert prefix_tree([]) == Branch(0, 0)
    assert prefix_tree([[1, 2]]) == Branch(0, 0, members=[0])
    # A long piece behind a short one is found too.
    rows = [[1, 2, *[3] * 20, 4], [1, 2, *[3] * 20, 5], [1, 9]]
    assert prefix_tree(rows, shortest=10) == Branch(0, 0, members=[2], children=[Branch(0, 22, members=[0, 1])])


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_answers_are_those_of_every_request_alone(name, batch_size):
    model = small_model(name)
    plain, shared = language_model(HFLM, model, 1), language_model(SharedPrefixLM, model, batch_size)
    assert shared.shares
    answers = plain.generate_until(generation())
    assert len(set(answers)) > 3
    assert shared.generate_until(generation()) == answers
    expected, found = plain.loglikelihood(scoring()), shared.loglikelihood(scoring())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=2e-4, rtol=1e-5)


def test_prefixes_are_read_once(monkeypatch):
    shared = language_model(SharedPrefixLM, small_model("llama"), 1)
    read = []
    forward = shared.model.forward
    monkeypatch.setattr(
        shared.model,
        "forward",
        lambda *args, **kwargs: (read.append(kwargs["input_ids"].numel()), forward(**kwargs))[1],
    )
    shared.loglikelihood(scoring())
    context = [list(prompt.encode())[:-1] for prompt in prompts() for _ in range(3)]
    assert sum(read) < sum(map(len, context)) / 3


@pytest.mark.parametrize("options", [{"do_sample": True, "temperature": 0.7}, {"num_beams": 2}])
def test_other_ways_of_generating(options):
    """Every request is answered, whatever is drawn or searched."""
    shared = language_model(SharedPrefixLM, small_model("llama"), 2)
    torch.manual_seed(0)
    assert all(isinstance(answer, str) for answer in shared.generate_until(generation(**options)))


def test_a_model_that_cannot_continue_shares_nothing(caplog):
    model = small_model("llama")
    forward = model.forward

    def forgets(*args, cache=None, **kwargs):
        return forward(*args, cache=None, **kwargs)

    model.forward = forgets
    shared = language_model(SharedPrefixLM, model, 1)
    assert not shared.shares and "No shared prefixes" in caplog.text


def test_nothing_is_truncated():
    shared = language_model(SharedPrefixLM, small_model("llama"), 1)
    with pytest.raises(ValueError, match="163 tokens and 400 for the answer is longer than max_length 512"):
        shared.generate_until(generation(max_gen_toks=400))
    long = Instance(request_type="loglikelihood", doc={}, arguments=("a" * 600, " b"), idx=0)
    with pytest.raises(ValueError, match="never truncated"):
        shared.loglikelihood([long])
