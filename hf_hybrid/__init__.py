"""Hybrid language models for transformers. Importing the package registers every family with the Auto classes.

A model class, and transformers' modelling code with it (seconds), is imported when it is first used.
"""

from importlib import import_module

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_hwh import HwHConfig

__version__ = "0.1.0"

# One row per family: configuration, modelling file, and what each Auto class loads from it.
_FAMILIES = [
    (
        HwHConfig,
        "modeling_hwh",
        {
            AutoModel: "HwHModel",
            AutoModelForCausalLM: "HwHForCausalLM",
            AutoModelForSequenceClassification: "HwHForSequenceClassification",
            AutoModelForTokenClassification: "HwHForTokenClassification",
        },
    ),
]


class _ImportedAtFirstUse(type):
    """The type of what stands for a model class in an Auto class's table until something of it is asked for."""

    def __getattr__(cls, attribute):
        return getattr(__getattr__(cls.__name__), attribute)

    def __call__(cls, *args, **kwargs):
        return __getattr__(cls.__name__)(*args, **kwargs)


def __getattr__(name: str):
    """Imports the model class `name`; the classes of its family take the places of their stand-ins."""
    for config, module_name, models in _FAMILIES:
        if name in _class_names(config, models):
            module = import_module(f".{module_name}", __name__)
            for auto, model_name in models.items():
                auto.register(config, getattr(module, model_name), exist_ok=True)
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _class_names(config, models) -> list[str]:
    return [config.__name__.replace("Config", "PreTrainedModel"), *models.values()]


for _config, _module_name, _models in _FAMILIES:
    AutoConfig.register(_config.model_type, _config)
    for _auto, _name in _models.items():
        _members = {"config_class": _config, "__module__": f"{__name__}.{_module_name}"}
        _auto.register(_config, _ImportedAtFirstUse(_name, (), _members))

__all__ = [config.__name__ for config, _, _ in _FAMILIES]
__all__ += [name for config, _, models in _FAMILIES for name in _class_names(config, models)]
