"""Writes the golden checkpoints: tiny models that every later version must load, with the logits they had at the start.

    python tests/golden/make.py NAME

writes `tests/golden/NAME`, which must not exist: a golden checkpoint is never written again. If a change of the code
needs that, published checkpoints no longer load, and the change needs a way to load them.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import hf_hybrid

SIZES = {
    "vocab_size": 17,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}

# One or more configurations of each family, with every option whose parameters or meaning could change.
GOLDEN = {
    "hwh": hf_hybrid.HwHConfig(
        **SIZES,
        full_attention_heads=[[1], [0, 1, 3]],
        full_attention_rope=[False, True],
        qk_norm=True,
        attention_output_gate="headwise",
        linear_value_head_dim=3,
    ),
    "hwh-upcycling": hf_hybrid.HwHConfig(
        **SIZES,
        preset="upcycling",
        full_attention_heads=[[2, 3], []],
        tie_word_embeddings=True,
        attention_bias=True,
        attention_head_scale=True,
        attention_output_norm=True,
        linear_rope=True,
        per_layer_config={1: {"intermediate_size": 6}},
    ),
    "mobius": hf_hybrid.MobiusConfig(
        **SIZES,
        num_block_groups=2,
        passes=3,
        start_group=1,
        stream_embeddings=True,
        input_injection=True,
        pass_norm=True,
        full_attention_heads=[[1, 2], [0, 3]],
        linear_value_head_dim=3,
    ),
    "mobius-modded-gpt2": hf_hybrid.MobiusConfig.from_scratch(
        "modded-gpt2",
        **SIZES,
        num_block_groups=1,
        passes=2,
        depth_order="layer_loop",
    ),
    "dual-stream": hf_hybrid.DualStreamConfig(
        **SIZES, prediction_window=2, qk_norm=True, attention_bias=True, tie_word_embeddings=True
    ),
    "dual-stream-reverse": hf_hybrid.DualStreamConfig(
        **SIZES, stream_mode="reverse", prediction_window=1, mlp_taper={"multiple_of": 5}
    ),
    "tlm-gated": hf_hybrid.TLMConfig(
        **SIZES, token_mixer="gated_attention", mlp_taper={"multiple_of": 5}, tie_word_embeddings=True
    ),
    "tlm-mag": hf_hybrid.TLMConfig(
        **SIZES, token_mixer="titans", memory_chunk_size=3, sliding_window=4, mlp_taper={"multiple_of": 5}
    ),
    "tlm-mal": hf_hybrid.TLMConfig(
        **SIZES,
        token_mixer="titans",
        memory_variant="mal",
        memory_residual=False,
        memory_expansion=1,
        attention_bias=True,
        mlp_taper=None,
    ),
    "tlm-hope": hf_hybrid.TLMConfig(**SIZES, token_mixer="hope", cms_periods=[1, 3], mlp_taper={"multiple_of": 5}),
}


def folder_of(name: str) -> Path:
    return Path(__file__).parent / name


def make(name: str):
    """Writes one checkpoint: config.json, model.safetensors, and expected.safetensors with inputs and logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GOLDEN[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    tokens = torch.randint(0, model.config.vocab_size, (2, 11))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask).logits
    folder = folder_of(name)
    folder.mkdir()
    # Not `save_pretrained`, which copies the code as well.
    model.config.architectures = [type(model).__name__]
    model.config.to_json_file(folder / "config.json")
    tied = model.all_tied_weights_keys
    weights = {key: tensor for key, tensor in model.state_dict().items() if key not in tied}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({"input_ids": tokens, "attention_mask": mask, "logits": logits}, folder / "expected.safetensors")


if __name__ == "__main__":
    make(sys.argv[1])
