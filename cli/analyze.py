"""`hf-hybrid analyze`: RoPE model + text -> head map."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_hybrid.cli.options import SEEDS

Divergence = StrEnum("Divergence", ["js", "kl", "tv"])
Ablation = StrEnum("Ablation", ["drop", "unrotate"])
Dtype = StrEnum("Dtype", ["float32", "bfloat16", "float16", "auto"])


def analyze(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or a .gguf file.")],
    text: Annotated[Path | None, typer.Option(help="UTF-8 text; without it, Python's own documentation.")] = None,
    out: Annotated[Path, typer.Option(help="The head map to write.")] = Path("head_map.safetensors"),
    windows: Annotated[int, typer.Option(min=1, help="Windows of the text that are analysed.")] = 8,
    window_length: Annotated[int, typer.Option(min=16, help="Tokens of a window.")] = 2048,
    queries: Annotated[int, typer.Option(min=1, help="Queries sampled from each window.")] = 64,
    divergence: Annotated[Divergence, typer.Option(help="Jensen-Shannon, Kullback-Leibler, total variation.")] = "kl",
    ablation: Annotated[Ablation, typer.Option(help="What RFIS does to a rotary pair.")] = "drop",
    seed: Annotated[int, typer.Option(**SEEDS, help="Seed of the sampled queries.")] = 0,
    validate: Annotated[bool, typer.Option("--validate", help="Switch RoPE off in heads; print the loss.")] = False,
    gguf_file: Annotated[str | None, typer.Option(help="Which .gguf file of the folder or repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of a hub repository.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; auto keeps the checkpoint's.")] = "float32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Measure every attention head of a RoPE model and write a head map."""
    from hf_hybrid.conversion.files import require_place

    require_place(out, overwrite=overwrite, remedy="pass --overwrite")
    if out.suffix != ".safetensors":
        raise ValueError(f"--out is {out}: a head map is a safetensors file, name it .safetensors")
    from rich.console import Console
    from rich.progress import Progress

    from hf_hybrid.conversion.analyze import analyze_heads, validate_map
    from hf_hybrid.conversion.source_model import load_source
    from hf_hybrid.conversion.text_data import heldout_windows

    console = Console()
    with console.status(f"loading {model}"):
        options = {"gguf_file": gguf_file, "revision": revision}
        loaded, tokenizer = load_source(model, dtype=dtype.value, device=device, **options)
    # Before the work: the text must reach for the validation as well.
    heldout = heldout_windows(tokenizer, text) if validate else None
    with Progress(console=console, transient=True) as bar:
        step = advance(bar, "analysing layers")
        head_map = analyze_heads(
            loaded,
            tokenizer,
            text,
            windows=windows,
            window_length=window_length,
            queries_per_window=queries,
            divergence=divergence.value,
            ablation=ablation.value,
            seed=seed,
            progress=step,
        )
    head_map.save(out)
    console.print(summary(head_map))
    if heldout is not None:
        with Progress(console=console, transient=True) as bar:
            rows = validate_map(loaded, head_map, heldout, progress=advance(bar, "validating"))
        console.print(validation_table(rows, heldout.shape))
    typer.echo(f"wrote {out}")


def advance(bar, description: str):
    """A callback (steps done, steps in all) that moves a new task of a rich progress bar."""
    task = bar.add_task(description)
    return lambda done, total: bar.update(task, completed=done, total=total)


def summary(head_map):
    """A table of what the map says: sizes, RPD quantiles, classes of heads, the GPBand."""
    from rich.table import Table

    from hf_hybrid.conversion.head_scores import gpband, natural_classes

    rpd, metadata = head_map.rpd, head_map.metadata
    unit = {"js": "bits", "kl": "nats", "tv": "total variation"}[metadata["settings"]["divergence"]]
    table = Table(title=f"Heads of {metadata['model']}", show_header=False)
    table.add_row("heads", f"{head_map.num_layers} layers x {metadata['num_attention_heads']}")
    quantiles = rpd.flatten().quantile(rpd.new_tensor([0.0, 0.25, 0.5, 0.75, 1.0])).tolist()
    table.add_row(f"RPD ({unit}), minimum, quartiles, maximum", "  ".join(f"{value:.3f}" for value in quantiles))
    if (cuts := natural_classes(rpd.numpy())) is not None:
        low, high = int((rpd < cuts[0]).sum()), int((rpd >= cuts[1]).sum())
        table.add_row("retrieval heads", f"{low} with RPD below {cuts[0]:.3f}")
        table.add_row("between", f"{rpd.numel() - low - high}")
        table.add_row("positional heads", f"{high} with RPD from {cuts[1]:.3f} on")
    layers = metadata["wavelength_layers"]
    wavelengths, length = head_map.tensors["wavelengths"], metadata["training_length"]
    band = gpband(head_map.tensors["rfis"][layers], wavelengths, length)
    ends = f"pairs {band.first} to {band.last} of {len(wavelengths)}, peak at {band.peak}"
    table.add_row("GPBand" if len(layers) == head_map.num_layers else f"GPBand of layers {layers}", ends)
    table.add_row("  wavelengths (tokens)", f"{band.wavelengths[0]:,.0f} to {band.wavelengths[-1]:,.0f}")
    if length is not None:
        ratios = f"{band.ratios[0]:.2f} to {band.ratios[-1]:.2f} times {length:,}"
        table.add_row("  relative to the training length", ratios)
    return table


def validation_table(rows, shape: tuple[int, int]):
    """Held-out loss with RoPE switched off in chosen heads, and its rise over the model as it is."""
    from rich.table import Table

    table = Table(title=f"Held-out loss with RoPE switched off, {shape[0]} windows of {shape[1]} tokens")
    for column in ("share of heads", "heads", "which", "NLL (nats per token)", "rise"):
        table.add_column(column, justify="left" if column == "which" else "right")
    for row in rows:
        which = {"none": "none", "random": f"random, seed {row.seed}"}.get(row.choice, f"{row.choice} RPD")
        table.add_row(f"{row.share:.1%}", str(row.heads), which, f"{row.nll:.3f}", f"{row.nll - rows[0].nll:+.3f}")
    return table
