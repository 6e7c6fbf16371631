"""The pipeline tests that the source distribution leaves out, and the tiny models that they load."""

import json
import string
from typing import ClassVar

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, pipeline

EXAMPLES = ["The quick brown fox jumps over the lazy dog.", "To be", "a longer text, with a comma and 12 digits"]
LABELS = ["sport", "science", "food"]


class PipelineTest:
    """What `PipelineTesterMixin` asks of a task's test: build the pipeline, then check its answers to `EXAMPLES`."""

    task: str
    arguments: ClassVar[dict] = {}

    def get_test_pipeline(self, model, tokenizer, dtype):
        pipe = pipeline(self.task, model=model, tokenizer=tokenizer, dtype=dtype, **self.arguments)
        return pipe, EXAMPLES

    def run_pipeline_test(self, pipe, examples):
        with torch.no_grad():
            for text, output in zip(examples, pipe(examples), strict=True):
                inputs = pipe.tokenizer(text, return_tensors="pt")
                self.check(pipe, text, inputs, output)

    def check(self, pipe, text, inputs, output):
        """Compares `output` with the model called directly."""
        raise NotImplementedError


class FeatureExtractionTest(PipelineTest):
    task = "feature-extraction"

    def check(self, pipe, text, inputs, output):
        torch.testing.assert_close(torch.tensor(output), pipe.model(**inputs).last_hidden_state)


class TextGenerationTest(PipelineTest):
    task = "text-generation"
    arguments: ClassVar[dict] = {"max_new_tokens": 5, "do_sample": False}

    def check(self, pipe, text, inputs, output):
        tokens = pipe.model.generate(**inputs, max_new_tokens=5, do_sample=False)
        assert output[0]["generated_text"] == pipe.tokenizer.decode(tokens[0], skip_special_tokens=True)


class TextClassificationTest(PipelineTest):
    task = "text-classification"
    arguments: ClassVar[dict] = {"top_k": None}

    def check(self, pipe, text, inputs, output):
        probabilities = pipe.model(**inputs).logits[0].softmax(-1)
        for answer in output:
            expected = probabilities[pipe.model.config.label2id[answer["label"]]]
            torch.testing.assert_close(torch.tensor(answer["score"]), expected)


class TokenClassificationTest(PipelineTest):
    task = "token-classification"

    def check(self, pipe, text, inputs, output):
        scores, labels = pipe.model(**inputs).logits[0].softmax(-1).max(-1)
        label2id = pipe.model.config.label2id
        assert [(label2id[answer["entity"]], answer["index"]) for answer in output] == [
            (label, index) for index, label in enumerate(labels.tolist()) if label2id.get("O") != label
        ]
        torch.testing.assert_close(torch.tensor([float(answer["score"]) for answer in output]), scores)


class ZeroShotTest(PipelineTest):
    task = "zero-shot-classification"
    arguments: ClassVar[dict] = {"candidate_labels": LABELS}

    def check(self, pipe, text, inputs, output):
        assert sorted(output["labels"]) == sorted(LABELS)
        assert output["sequence"] == text
        torch.testing.assert_close(sum(output["scores"]), 1.0)


# Under the names that `PipelineTesterMixin` has for the tasks.
PIPELINE_TESTS = {
    "feature-extraction": FeatureExtractionTest,
    "text-generation": TextGenerationTest,
    "text-classification": TextClassificationTest,
    "token-classification": TokenClassificationTest,
    "zero-shot": ZeroShotTest,
}


def pipeline_model_mapping(family):
    """The class that each task's pipeline runs on, for the tasks that the family has a class for."""
    mapping = {
        "feature-extraction": family.base_class,
        "text-generation": family.causal_lm_class,
        "text-classification": family.sequence_classification_class,
        "zero-shot": family.sequence_classification_class,
        "token-classification": family.token_classification_class,
    }
    return {task: model_class for task, model_class in mapping.items() if model_class is not None}


def write_tiny_models(folder, families):
    """Lays out `folder` as `PipelineTesterMixin` reads it: <model_type>/<class name>/, and a summary."""
    tokenizer = character_tokenizer()
    summary = {}
    for family in families:
        for model_class in family.model_classes:
            torch.manual_seed(0)
            target = folder / family.config_class.model_type / model_class.__name__
            model_class(family.tiny_config(num_labels=3)).save_pretrained(target)
            tokenizer.save_pretrained(target)
            summary[model_class.__name__] = {"tokenizer_classes": [type(tokenizer).__name__], "processor_classes": []}
    (folder / "reports").mkdir(exist_ok=True)
    (folder / "reports" / "tiny_model_summary.json").write_text(json.dumps(summary))


def character_tokenizer():
    """A token for each printable ASCII character, 99 with the special ones."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    characters = special + [character for character in string.printable if character.isprintable()]
    vocabulary = {character: index for index, character in enumerate(characters)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
