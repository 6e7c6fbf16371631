"""`hf-hybrid convert`: a RoPE checkpoint -> an HwH checkpoint."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Preset = StrEnum("Preset", ["upcycling", "from_scratch"])
Dtype = StrEnum("Dtype", ["float32", "bfloat16", "float16"])


def convert(
    model: Annotated[str, typer.Argument(help="Source: folder, hub id or .gguf file.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    heads: Annotated[Path | None, typer.Option(help="Allocation (heads.json) of the full-attention heads.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Keep every head as it is: the source model itself.")] = False,
    map: Annotated[Path | None, typer.Option(help="Head map, for the decay of each linear head.")] = None,
    keep_rope: Annotated[bool, typer.Option("--keep-rope", help="Full-attention heads stay rotary.")] = False,
    keep_window: Annotated[bool, typer.Option("--keep-window", help="Full-attention heads keep their window.")] = False,
    preset: Annotated[Preset, typer.Option(help="Defaults of everything else.")] = Preset.upcycling,
    set: Annotated[list[str] | None, typer.Option(metavar="FIELD=JSON", help="Another HwHConfig field.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of the weights; default: the source's.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file.")] = "5GB",
    revision: Annotated[str | None, typer.Option(help="Revision of a hub id.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="The GGUF file in MODEL, if it holds several.")] = None,
) -> None:
    """Turn a RoPE checkpoint into a head-wise hybrid one.

    An interrupted run is taken up by the same command. The result loads with trust_remote_code=True.
    """
    overrides = parse_overrides(set or [])

    import torch
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from hf_hybrid.conversion.allocate import Allocation
    from hf_hybrid.conversion.convert import convert as run
    from hf_hybrid.conversion.head_map import HeadMap

    allocation = None if heads is None else Allocation.load(heads)
    head_map = None if map is None else HeadMap.load(map)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("converting", total=None, visible=False)
        record = run(
            model,
            out,
            heads=allocation,
            exact=exact,
            head_map=head_map,
            keep_rope=keep_rope,
            keep_window=keep_window,
            preset=preset.value,
            overrides=overrides,
            dtype=None if dtype is None else getattr(torch, dtype.value),
            max_shard_size=max_shard_size,
            revision=revision,
            gguf_file=gguf_file,
            progress=lambda done, total: bar.update(task, completed=done, total=total, visible=True),
        )
    typer.echo(describe(record))
    for note in notes_on_origin(record["source"]["model"], allocation=allocation, head_map=head_map):
        typer.secho(note, fg=typer.colors.YELLOW, err=True)
    typer.echo(f"wrote {out}")


def notes_on_origin(source: str, *, allocation, head_map) -> list[str]:
    """A line for an allocation or a map that another model was measured for, by the last part of the model's name."""
    measured = {"allocation": allocation and allocation.model, "head map": head_map and head_map.metadata["model"]}
    return [
        f"note: the {kind} was measured on {model}, the source is {source}: make one of the source"
        for kind, model in measured.items()
        if model and Path(model).name.removesuffix(".gguf") != Path(source).name.removesuffix(".gguf")
    ]


def parse_overrides(texts: list[str]) -> dict[str, object]:
    """`FIELD=JSON` each -> values by name. Raises ValueError for anything else, and for a field given twice."""
    overrides = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            # json accepts NaN and Infinity, which JSON does not have.
            content = json.loads(value, parse_constant=lambda constant: json.loads(constant.lower()))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f'--set {text!r} is not FIELD=JSON, such as linear_rope=true or linear_start_token="recurrent"'
            ) from error
        if name in overrides:
            raise ValueError(f"--set gives {name} twice: {overrides[name]!r} and {content!r}; give it once")
        overrides[name] = content
    return overrides


def describe(record: dict) -> str:
    """What went where, in a few lines."""
    heads = record["settings"]["full_attention_heads"]
    made = sum(not tensor["from"] for tensor in record["tensors"].values())
    lines = [
        f"{record['source']['model']} ({record['source']['model_type']}):"
        f" {sum(len(layer) for layer in heads)} full-attention heads in {len(heads)} layers",
        f"{len(record['tensors'])} tensors in {len(record['settings']['files'])} files:"
        f" {len(record['tensors']) - made} from the source, {made} new; their origins are in conversion.json",
        *(f"dropped {name}: {reason}" for name, reason in record["dropped"].items()),
    ]
    return "\n".join(lines)
