"""`hf-hybrid inspect`: parameters, heads and cache size of a model, next to the Transformer of the same size."""

from typing import Annotated

import typer

LENGTHS = {"1k": 1024, "32k": 32 * 1024, "128k": 128 * 1024}


def inspect(
    model: Annotated[str, typer.Argument(help="Folder, hub id or .gguf file; only its configuration is read.")],
) -> None:
    """Show a model's parameters, heads and cache size."""
    from rich.console import Console

    from hf_hybrid.conversion.inspect_model import inspect_config, read_config

    config = read_config(model)
    size = inspect_config(config)
    transformer = inspect_config(config.baseline("transformer")) if hasattr(config, "baseline") else None
    console = Console(highlight=False)
    console.print(f"{model}: {config.model_type}, {str(size.dtype).removeprefix('torch.')}", soft_wrap=True)
    if hasattr(config, "full_attention_heads"):
        from hf_hybrid.conversion.allocate import draw_heads

        console.print("\nlayer, query heads (# full attention, . linear), full-attention heads:")
        console.print(draw_heads(config.full_attention_heads, config.num_attention_heads), markup=False, soft_wrap=True)
    console.print()
    console.print(tabulate(size, transformer))
    for note in notes(size):
        console.print(note, soft_wrap=True)


def tabulate(size, transformer):
    """A table of the model's sizes, with those of the Transformer of the same size beside them if there is one."""
    from rich import box
    from rich.table import Table

    columns = {"this model": size, "as a Transformer": transformer} if transformer else {"Transformer": size}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("parameters")
    for heading in columns:
        table.add_column(heading, justify="right")
    if transformer:
        table.add_column("share", justify="right")

    def add(name, measure, show=lambda value: f"{value:,}", **style):
        values = [measure(column) for column in columns.values()]
        share = [f"{values[0] / values[1]:.1%}" if values[1] else ""] if transformer else []
        table.add_row(name, *map(show, values), *share, **style)

    parts = list(dict.fromkeys(part for column in columns.values() for part in column.parameters))
    for part in parts:
        add(part, lambda column, part=part: column.parameters.get(part, 0))
    add("total", lambda column: column.num_parameters, end_section=True)
    table.add_row("[bold]cache of one sequence")
    add("bytes per token", lambda column: column.token_bytes)
    if any(column.windowed_token_bytes for column in columns.values()):
        add("once the windows are full", lambda column: column.token_bytes - column.windowed_token_bytes)
    add("bytes whatever the length", lambda column: column.recurrent_bytes + column.conv_bytes)
    for name, length in LENGTHS.items():
        add(f"at {name} tokens", lambda column, length=length: column.cache_bytes(length), show_mebibytes)
    return table


def show_mebibytes(value):
    return f"{value / 2**20:,.1f} MiB"


def notes(size):
    """What the figures stand for, where the table doesn't say it."""
    dtype = str(size.dtype).removeprefix("torch.")
    yield f"Keys, values and convolution states are {dtype}, as the weights; 1k is 1,024 tokens."
    if size.recurrent_bytes:
        yield (
            f"Whatever the length: recurrent states (float32) {size.recurrent_bytes:,} bytes, convolution states "
            f"({dtype}) {size.conv_bytes:,} bytes."
        )
    if size.token_bytes == size.dtype.itemsize:
        yield "No head is full attention: the cache only keeps one mark per token, which counts positions."
