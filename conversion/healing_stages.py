"""One healing stage from a pair of models to a healed folder, as the commands and the demo run it."""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hf_hybrid.conversion.calibrate import CalibrateSettings, calibrate
from hf_hybrid.conversion.distill import AlignSettings, align
from hf_hybrid.conversion.files import require_place
from hf_hybrid.conversion.healing import HealingText, Pair, write_healed


def finished_layers(out: str | Path) -> Path:
    """Where a stage that goes on after a kill keeps its finished layers until `out` is written."""
    return Path(out).with_name(f"{Path(out).name}.align")


def run_stage(
    pair: Pair,
    text: HealingText,
    settings: CalibrateSettings | AlignSettings,
    out: str | Path,
    *,
    progress: Callable[[int, float, float], None] | None = None,
) -> tuple[float, float]:
    """Heals `pair.hybrid` in place and writes it to the new folder `out`.

    Args:
        pair: of `load_pair`.
        text: of `healing_text`.
        settings: their type says which stage.
        out: folder to write.
        progress: called with each layer and the share of the target's energy that is missed before and after.

    Returns:
        The share that is missed before and after, mean over layers.

    Raises:
        FileExistsError: `out` is there.
        HealingError: the finished layers beside `out` are of another run, or a result is not finite.
    """
    require_place(out)
    arguments = (pair.source, pair.hybrid, text.sequences, text.starts, settings)
    if isinstance(settings, AlignSettings):
        name, errors = "align", align(*arguments, checkpoint=finished_layers(out), progress=progress)
    else:
        name, errors = "calibrate", calibrate(*arguments, progress=progress)
    before, after = (sum(layer) / len(errors) for layer in zip(*errors, strict=True))
    rows, length = text.sequences.shape
    stage = {
        "stage": name,
        "tokens": rows * length,
        "length": length,
        "starts": len(text.starts),
        "seed": text.seed,
        **asdict(settings),
        "text_digest": text.digest,
        "missed_energy": round(after, 4),
    }
    write_healed(pair, out, stage)
    if name == "align":
        shutil.rmtree(finished_layers(out))
    return before, after
