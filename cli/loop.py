"""`hf-hybrid loop`: does a frozen model get better when some of its middle layers run again?"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_hybrid.cli.options import SEEDS

Rule = StrEnum("Rule", ["damped", "naive"])


def loop(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or a .gguf file; any decoder of transformers.")],
    windows: Annotated[
        str | None, typer.Option(help="Layers, such as 12:16,14:18 (the end is outside); default: the middle ones.")
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="Layers of a default window.")] = 4,
    steps: Annotated[str, typer.Option(help="How often each window runs.")] = "2,3",
    beta: Annotated[float, typer.Option(min=0, max=1, help="Share of the plain output.")] = 0.5,
    rules: Annotated[list[Rule] | None, typer.Option("--rule", help="Once for each; default: damped.")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text; without it, Python's own documentation.")] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window of the held-out text.")] = 1024,
    copy_distance: Annotated[int, typer.Option(min=64, help="Tokens between a random span and its copy.")] = 256,
    seed: Annotated[int, typer.Option(**SEEDS, help="Of the random spans.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A JSON file with all scores.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    gguf_file: Annotated[str | None, typer.Option(help="Which .gguf file of the folder or repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of a hub repository.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
) -> None:
    """Measure the held-out loss and copying of a model with windows of its layers looped, without any training."""
    from dataclasses import asdict

    from hf_hybrid.conversion.files import require_place, write_json

    if out is not None:
        require_place(out, overwrite=overwrite, remedy="pass --overwrite")
    pairs = None if windows is None else parse_windows(windows)
    counts = [parse_count(count) for count in steps.split(",")]
    from hf_hybrid.conversion.depth_asymmetry import decoder_layers
    from hf_hybrid.conversion.looping import check_window, evaluate_loops, middle_windows
    from hf_hybrid.conversion.source_model import load_source
    from hf_hybrid.conversion.text_data import heldout_windows, load_text, text_digest

    content = load_text(text)
    loaded, tokenizer = load_source(model, gguf_file=gguf_file, revision=revision, device=device)
    depth = len(decoder_layers(loaded))
    pairs = middle_windows(depth, size) if pairs is None else pairs
    for pair in pairs:
        check_window(*pair, depth)
    tokens = heldout_windows(tokenizer, text, length=length).to(loaded.device)
    settings = [(pair, count, rule.value) for rule in rules or [Rule.damped] for pair in pairs for count in counts]
    typer.echo(f"{'layers':>9} {'steps':>5} {'rule':>7} {'NLL':>8} {'copy':>6}")
    scores = []
    for score in evaluate_loops(loaded, tokens, settings, beta=beta, copy_distance=copy_distance, seed=seed):
        window = "none" if score.window is None else "{}:{}".format(*score.window)
        typer.echo(f"{window:>9} {score.steps:5} {score.rule:>7} {score.nll:8.4f} {score.copy_top1:6.1%}")
        scores.append(asdict(score))
    if out is not None:
        facts = {"model": loaded.config.name_or_path, "text_digest": text_digest(content), "length": length}
        write_json(out, {**facts, "beta": beta, "copy_distance": copy_distance, "seed": seed, "scores": scores})
        typer.echo(f"wrote {out}")


def parse_windows(text: str) -> list[tuple[int, int]]:
    """`12:16,14:18` -> [(12, 16), (14, 18)]. Raises `ValueError` naming the part that is none."""
    pairs = []
    for part in text.split(","):
        start, _, end = part.partition(":")
        if not (start.strip().isdigit() and end.strip().isdigit()):
            raise ValueError(f"windows has {part!r}: give start and end of each, such as 12:16,14:18")
        pairs.append((int(start), int(end)))
    return pairs


def parse_count(text: str) -> int:
    """A number of steps, at least 1. Raises `ValueError` naming it if it is none."""
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"steps has {text!r}: give whole numbers from 1, such as 2,3")
    return int(text)
