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

from .configuration_dual_stream import DualStreamConfig
from .configuration_hwh import HwHConfig
from .configuration_mobius import MobiusConfig
from .configuration_tlm import TLMConfig

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
    (
        MobiusConfig,
        "modeling_mobius",
        {
            AutoModel: "MobiusModel",
            AutoModelForCausalLM: "MobiusForCausalLM",
            AutoModelForSequenceClassification: "MobiusForSequenceClassification",
            AutoModelForTokenClassification: "MobiusForTokenClassification",
        },
    ),
    (
        DualStreamConfig,
        "modeling_dual_stream",
        {
            AutoModel: "DualStreamModel",
            AutoModelForCausalLM: "DualStreamForCausalLM",
            AutoModelForSequenceClassification: "DualStreamForSequenceClassification",
            AutoModelForTokenClassification: "DualStreamForTokenClassification",
        },
    ),
    (
        TLMConfig,
        "modeling_tlm",
        {
            AutoModel: "TLMModel",
            AutoModelForCausalLM: "TLMForCausalLM",
            AutoModelForSequenceClassification: "TLMForSequenceClassification",
            AutoModelForTokenClassification: "TLMForTokenClassification",
        },
    ),
]


class _ModelClass:
    """Stands for a model class in an Auto class's table until the class is imported, and acts as that class."""

    def __init__(self, name: str, module: str, config_class: type):
        self.__name__ = self.__qualname__ = name
        self.__module__ = module
        self.config_class = config_class

    def _imported(self) -> type:
        return __getattr__(self.__name__)

    def __getattr__(self, attribute: str):
        return getattr(self._imported(), attribute)

    def __call__(self, *args, **kwargs):
        return self._imported()(*args, **kwargs)

    def __mro_entries__(self, bases: tuple) -> tuple[type]:
        return (self._imported(),)

    def __instancecheck__(self, instance) -> bool:
        return isinstance(instance, self._imported())

    def __subclasscheck__(self, subclass) -> bool:
        return issubclass(subclass, self._imported())

    def __eq__(self, other) -> bool:
        return self is other or self._imported() is other

    def __hash__(self) -> int:
        return hash(self._imported())

    def __reduce__(self):
        return __getattr__, (self.__name__,)


def __getattr__(name: str):
    """Imports the model class `name`; the classes of its family take the places of their stand-ins."""
    for config, module_name, models in _FAMILIES:
        if name in _class_names(config, models):
            module = import_module(f".{module_name}", __name__)
            for auto, model_name in models.items():
                auto.register(config, getattr(module, model_name), exist_ok=True)
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _class_names(config, models) -> list[str]:
    return [config.__name__.replace("Config", "PreTrainedModel"), *models.values()]


for _config, _module_name, _models in _FAMILIES:
    AutoConfig.register(_config.model_type, _config)
    for _auto, _name in _models.items():
        _auto.register(_config, _ModelClass(_name, f"{__name__}.{_module_name}", _config))

__all__ = [config.__name__ for config, _, _ in _FAMILIES]
__all__ += [name for config, _, models in _FAMILIES for name in _class_names(config, models)]
