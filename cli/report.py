"""`hf-hybrid report`: a page with pictures from a head map."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    map: Annotated[Path, typer.Argument(help="Head map: .safetensors, DuoAttention's .tsv or Retrieval_Head's .json.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("report"),
    heads: Annotated[Path | None, typer.Option(help="An allocation (heads.json) to draw as well.")] = None,
    num_attention_heads: Annotated[int | None, typer.Option(help="Query heads a layer; a .tsv needs it.")] = None,
    num_key_value_heads: Annotated[int | None, typer.Option(help="KV heads a layer; a .json needs it.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing page.")] = False,
) -> None:
    """Write a page with pictures from a head map."""
    from hf_hybrid.conversion.files import require_place

    require_place(out / "index.html", overwrite=overwrite, remedy="pass --overwrite")
    from hf_hybrid.conversion.allocate import Allocation
    from hf_hybrid.conversion.head_map import load_head_map
    from hf_hybrid.conversion.report import write_report

    head_map = load_head_map(map, num_attention_heads=num_attention_heads, num_key_value_heads=num_key_value_heads)
    allocation = None if heads is None else Allocation.load(heads)
    for path in write_report(head_map, out, allocation):
        typer.echo(f"wrote {path}")
