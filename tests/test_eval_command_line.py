"""The tasks under the plain `lm_eval` command, with a saved HwH model."""

import json
import subprocess
import sys

import lm_eval
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tiny_tokenizer import save_tiny_tokenizer
from transformers import AutoTokenizer

from hf_hybrid import HwHConfig, HwHForCausalLM
from hf_hybrid.eval import TASKS

NAMES = ["hybrid_niah_single_1", "hybrid_phone_book", "hybrid_repeated_span"]
METADATA = {"lengths": [320, 448], "num_samples": 8, "seed": 3}
LIMIT = 12


@pytest.fixture
def model_folder(tmp_path):
    """Weights larger than at initialisation: answers that depend on the prompt, logits too far apart for rounding."""
    folder = save_tiny_tokenizer(tmp_path / "model")
    torch.manual_seed(0)
    model = HwHForCausalLM(
        HwHConfig(
            vocab_size=600,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            full_attention_heads=[[0, 3], [1]],
            max_position_embeddings=512,
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=1,
        )
    )
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.4)
    model.save_pretrained(folder)
    return folder


def one_by_one(folder):
    """Responses of each task by document, from the model's own class in batches of one."""
    model = HFLM(pretrained=HwHForCausalLM.from_pretrained(folder), tokenizer=AutoTokenizer.from_pretrained(folder))
    assert model.batch_size == 1
    tasks = TaskManager(
        include_path=str(TASKS), include_defaults=False, metadata=METADATA | {"pretrained": str(folder)}
    ).load(NAMES)
    samples = lm_eval.evaluate(model, tasks, limit=LIMIT)["samples"]
    return {name: {doc["doc_id"]: doc["resps"][0][0] for doc in samples[name]} for name in NAMES}


def test_lm_eval_in_batches_of_8_answers_as_one_by_one(model_folder, tmp_path):
    """lm_eval finds the tasks by --include_path and the model by --trust_remote_code; padding changes no answer."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "8"]
    command += ["--model_args", f"pretrained={model_folder},dtype=float32,max_length=512", "--trust_remote_code"]
    command += ["--tasks", ",".join(NAMES), "--include_path", str(TASKS), "--metadata", json.dumps(METADATA)]
    command += ["--limit", str(LIMIT), "--log_samples", "--output_path", str(out)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)

    expected = one_by_one(model_folder)
    for name in NAMES:
        (path,) = out.rglob(f"samples_{name}_*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        assert {sample["doc"]["length"] for sample in samples} == {320, 448}
        found = {sample["doc_id"]: sample["resps"][0][0] for sample in samples}
        assert len(found) == LIMIT
        if name == "hybrid_repeated_span":
            for number, (log_likelihood, _) in found.items():
                assert float(log_likelihood) == pytest.approx(expected[name][number][0], rel=1e-4)
        else:
            assert found == expected[name] and len(set(found.values())) > 1
    (path,) = out.rglob("results_*.json")
    results = json.loads(path.read_text())["results"]["hybrid_phone_book"]
    assert {key for key in results if key.endswith(",none")} == {
        f"{length}{suffix},none" for length in (320, 448) for suffix in ("", "_stderr")
    }
