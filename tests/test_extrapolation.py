"""Loss by position: the same in pieces as in one pass, and no further than a table of positions goes."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, OPTConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_hybrid import HwHConfig
from hf_hybrid.eval.extrapolation import Bucket, buckets, nll_by_position, position_limit

SIZES = {
    "vocab_size": 89,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("chunk", [1, 7, 22, 50])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "hwh"])
def test_pieces_give_the_loss_of_one_pass(model_type, chunk):
    torch.manual_seed(0)
    window = {"sliding_window": 5} if model_type == "mistral" else {}
    config = HwHConfig(**SIZES) if model_type == "hwh" else CONFIG_MAPPING[model_type](**SIZES, **window)
    model = AutoModelForCausalLM.from_config(config).eval()
    input_ids = torch.randint(89, (3, 23))
    steps = []
    nll = nll_by_position(model, input_ids, chunk=chunk, progress=lambda *step: steps.append(step))
    with torch.no_grad():
        logits = model(input_ids).logits
    expected = F.cross_entropy(logits[:, :-1].mT, input_ids[:, 1:], reduction="none")
    torch.testing.assert_close(nll, expected, atol=1e-5, rtol=1e-5)
    assert steps[-1] == (69, 69) and steps == sorted(steps)


def test_buckets_cover_every_position_once():
    nll = torch.arange(20.0).view(2, 10)
    assert buckets(nll, 3) == [
        Bucket(1, 5, 6.5, 5.0),
        Bucket(5, 9, 10.5, 5.0),
        Bucket(9, 11, 13.5, 5.0),
    ]
    (only,) = buckets(nll[:1], 1)
    assert only == Bucket(1, 11, 4.5, None)


def test_a_table_of_positions_is_not_overrun():
    common = {"vocab_size": 89, "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 8}
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(**common, n_positions=16))
    opt = AutoModelForCausalLM.from_config(
        OPTConfig(**common, max_position_embeddings=11, word_embed_proj_dim=8, ffn_dim=8)
    )
    llama = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SIZES))
    assert (position_limit(gpt2), position_limit(opt), position_limit(llama)) == (16, 11, None)
    with pytest.raises(ValueError, match=r"17 tokens are more than the 16 rows.*lengths up to 16"):
        nll_by_position(gpt2, torch.zeros(1, 17, dtype=torch.long))
