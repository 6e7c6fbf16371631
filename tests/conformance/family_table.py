"""The model families that the common tests run on: one entry each, the first is the yardstick for skips."""

from dataclasses import dataclass, field

import transformers
from transformers.models.auto import modeling_auto

import hf_hybrid


@dataclass(frozen=True)
class Family:
    """A family's classes, and the configuration fields of its tiny model beside `TINY`.

    `attention_heads` lists, for each layer that outputs attention weights, how many heads they have.
    """

    name: str
    config_class: type
    base_class: type
    causal_lm_class: type
    sequence_classification_class: type | None = None
    token_classification_class: type | None = None
    fields: dict = field(default_factory=dict)
    attention_heads: tuple[int, ...] = ()

    @property
    def model_classes(self):
        classes = (
            self.base_class,
            self.causal_lm_class,
            self.sequence_classification_class,
            self.token_classification_class,
        )
        return tuple(model_class for model_class in classes if model_class is not None)

    def tiny_config(self, **fields):
        return self.config_class(**{**TINY, **self.fields, **fields})


TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES = (
    Family(
        "OlmoHybrid",
        transformers.OlmoHybridConfig,
        transformers.OlmoHybridModel,
        transformers.OlmoHybridForCausalLM,
        fields={
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_allow_neg_eigval": False,
        },
        attention_heads=(4,),
    ),
    Family(
        "HwH",
        hf_hybrid.HwHConfig,
        hf_hybrid.HwHModel,
        hf_hybrid.HwHForCausalLM,
        hf_hybrid.HwHForSequenceClassification,
        hf_hybrid.HwHForTokenClassification,
        fields={
            "full_attention_heads": [[1], [0, 2]],
            "full_attention_rope": [True, True],
            "sliding_window": 2,
            "sliding_window_layers": [1],
        },
        attention_heads=(1, 2),
    ),
    Family(
        "DualStream",
        hf_hybrid.DualStreamConfig,
        hf_hybrid.DualStreamModel,
        hf_hybrid.DualStreamForCausalLM,
        hf_hybrid.DualStreamForSequenceClassification,
        hf_hybrid.DualStreamForTokenClassification,
        fields={"prediction_window": 3, "mlp_taper": {"multiple_of": 4}},
    ),
    Family(
        "TLM",
        hf_hybrid.TLMConfig,
        hf_hybrid.TLMModel,
        hf_hybrid.TLMForCausalLM,
        hf_hybrid.TLMForSequenceClassification,
        hf_hybrid.TLMForTokenClassification,
        fields={
            "token_mixer": "titans",
            "memory_chunk_size": 4,
            "sliding_window": 3,
            "mlp_taper": {"multiple_of": 4},
        },
        attention_heads=(4, 4),
    ),
    Family(
        "Mobius",
        hf_hybrid.MobiusConfig,
        hf_hybrid.MobiusModel,
        hf_hybrid.MobiusForCausalLM,
        hf_hybrid.MobiusForSequenceClassification,
        hf_hybrid.MobiusForTokenClassification,
        fields={
            "full_attention_heads": [[0, 2], [1, 3]],
            "sliding_window": 64,
            "num_block_groups": 2,
            "passes": 2,
            "start_group": 1,
        },
        # Both layers twice.
        attention_heads=(2, 2, 2, 2),
    ),
)

# The mixins look a class up by name in these tables to choose its labels, some while they are imported.
# `AutoModel.register` does not fill these.
for family in FAMILIES:
    for names, model_class in (
        (modeling_auto.MODEL_MAPPING_NAMES, family.base_class),
        (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, family.causal_lm_class),
        (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, family.sequence_classification_class),
        (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, family.token_classification_class),
    ):
        if model_class is not None:
            names[family.config_class.model_type] = model_class.__name__
