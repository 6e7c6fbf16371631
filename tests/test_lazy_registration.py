"""What stands for a model class until it is imported acts as that class; importing the package imports no model."""

import subprocess
import sys

import pytest

PREAMBLE = """
import sys
from transformers import AutoModelForCausalLM
import hf_hybrid
assert "hf_hybrid.modeling_hwh" not in sys.modules and "transformers.modeling_utils" not in sys.modules
found = AutoModelForCausalLM._model_mapping[hf_hybrid.HwHConfig]
assert found.__name__ == "HwHForCausalLM" and found.config_class is hf_hybrid.HwHConfig
assert "hf_hybrid.modeling_hwh" not in sys.modules
"""
USES = {
    "is itself": "import hf_hybrid.modeling_hwh as made; assert found == made.HwHForCausalLM != found.__base__",
    "hash": "assert {found: 1}[hf_hybrid.HwHForCausalLM] == 1",
    "pickle": "import pickle; assert pickle.loads(pickle.dumps(found)) is hf_hybrid.HwHForCausalLM",
    "subclass of": "from transformers import PreTrainedModel; assert issubclass(found, PreTrainedModel)",
    "superclass of": "assert issubclass(hf_hybrid.HwHForCausalLM, found) and not issubclass(hf_hybrid.HwHModel, found)",
    "derived": "class Own(found): pass\nassert Own.__mro__[1] is hf_hybrid.HwHForCausalLM",
    "called": "assert isinstance(found(hf_hybrid.HwHConfig(num_hidden_layers=1, vocab_size=9)), found)",
    "attribute": "assert found.base_model_prefix == 'model'",
    "replaced": "hf_hybrid.HwHModel; assert type(AutoModelForCausalLM._model_mapping[hf_hybrid.HwHConfig]) is type",
    "listed": "assert {'HwHConfig', 'HwHForCausalLM', 'HwHPreTrainedModel'} <= set(dir(hf_hybrid))",
}


@pytest.mark.parametrize("use", USES)
def test_a_model_class_that_is_not_imported_yet(use):
    program = PREAMBLE + USES[use]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_refused():
    import hf_hybrid

    with pytest.raises(AttributeError, match="has no attribute 'HwHForPoetry'"):
        hf_hybrid.HwHForPoetry  # noqa: B018
