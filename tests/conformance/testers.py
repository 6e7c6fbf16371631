"""One test class for each family, put together from the mixins of transformers' own tests.

`run.py` lays the source distribution's `tests` package and names this file to pytest.
"""

import gc
import unittest
from unittest.mock import patch

import torch
from family_table import FAMILIES, TINY
from pipelines import PIPELINE_TESTS, pipeline_model_mapping
from tests.test_configuration_common import ConfigTester
from tests.test_memory_cleanup_mixin import MemoryCleanupMixin
from tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin, ids_tensor
from tests.test_training_mixin import TrainingTesterMixin

from tests import test_fsdp_mixin, test_pipeline_mixin, test_tensor_parallel_mixin

# The distributed tests run for the model types on a list, to save time on hundreds of models.
MODEL_TYPES = {family.config_class.model_type for family in FAMILIES}
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = MODEL_TYPES
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = MODEL_TYPES
test_pipeline_mixin.pipeline_test_mapping.update(
    {task: {"test": f"{test.__module__}.{test.__name__}"} for task, test in PIPELINE_TESTS.items()}
)


class ModelTester:
    """What the mixins ask of a tester: sizes, a tiny configuration, inputs with right padding."""

    batch_size = 13
    seq_length = 7
    is_training = True

    def __init__(self, family):
        self.family = family
        self.causal_lm_class = family.causal_lm_class
        config = self.get_config()
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = config.num_hidden_layers
        # A looped model records each application of a layer.
        self.expected_num_hidden_layers = getattr(config, "num_layer_applications", config.num_hidden_layers) + 1
        self.num_attention_heads = config.num_attention_heads

    def get_config(self):
        return self.family.tiny_config()

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        input_ids = ids_tensor([self.batch_size, self.seq_length], config.vocab_size)
        attention_mask = torch.ones_like(input_ids).tril()
        return config, {"input_ids": input_ids, "attention_mask": attention_mask}


class FamilyTest(
    MemoryCleanupMixin,
    ModelTesterMixin,
    GenerationTesterMixin,
    TrainingTesterMixin,
    test_fsdp_mixin.FSDPTesterMixin,
    test_tensor_parallel_mixin.TensorParallelTesterMixin,
    test_pipeline_mixin.PipelineTesterMixin,
):
    """The common tests. An override says what the original takes for granted and keeps the rest of it."""

    run_under_no_grad = False
    test_can_init_all_missing_weights_before_2023 = True
    family = None
    model_tester = None

    def setUp(self):
        super().setUp()
        self.model_tester = ModelTester(self.family)

    def test_config(self):
        ConfigTester(self, config_class=self.family.config_class, **{**TINY, **self.family.fields}).run_common_tests()

    def test_attention_outputs(self):
        """Takes it for granted that every layer outputs the attention of every head: a hybrid has them where it has
        softmax attention."""
        heads = self.family.attention_heads
        with patch.multiple(self.model_tester, num_hidden_layers=len(heads), num_attention_heads=heads[0]):
            super().test_attention_outputs()


def family_test_class(family):
    """The `unittest` class of a family; its name shows in the test ids."""
    attributes = {
        "family": family,
        "all_model_classes": family.model_classes,
        "pipeline_model_mapping": pipeline_model_mapping(family),
        "__module__": __name__,
    }
    return type(f"{family.name}ModelTest", (FamilyTest, unittest.TestCase), attributes)


# MemoryCleanupMixin collects garbage around every test: what is imported by now need not be searched each time.
gc.collect()
gc.freeze()

globals().update({f"{family.name}ModelTest": family_test_class(family) for family in FAMILIES})
