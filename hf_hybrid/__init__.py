"""Hybrid language models for transformers. Importing the package registers every family with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_hwh import HwHConfig
from .modeling_hwh import (
    HwHForCausalLM,
    HwHForSequenceClassification,
    HwHForTokenClassification,
    HwHModel,
    HwHPreTrainedModel,
)

__version__ = "0.1.0"

# One row per family: configuration, then what each Auto class loads.
_FAMILIES = [
    (
        HwHConfig,
        {
            AutoModel: HwHModel,
            AutoModelForCausalLM: HwHForCausalLM,
            AutoModelForSequenceClassification: HwHForSequenceClassification,
            AutoModelForTokenClassification: HwHForTokenClassification,
        },
    ),
]

for _config, _models in _FAMILIES:
    AutoConfig.register(_config.model_type, _config)
    # `register_for_auto_class` makes `save_pretrained` and `push_to_hub` copy the code and write `auto_map`.
    _config.register_for_auto_class()
    for _auto, _model in _models.items():
        _auto.register(_config, _model)
        _model.register_for_auto_class(_auto.__name__)

__all__ = [
    "HwHConfig",
    "HwHForCausalLM",
    "HwHForSequenceClassification",
    "HwHForTokenClassification",
    "HwHModel",
    "HwHPreTrainedModel",
]
