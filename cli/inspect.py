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
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{model}: {config.model_type}, {name_of(size.dtype)}", markup=False)
    if hasattr(config, "full_attention_heads"):
        from hf_hybrid.conversion.allocate import draw_heads

        console.print("\nlayer, query heads (# full attention, . linear), full-attention heads:")
        console.print(draw_heads(config.full_attention_heads, config.num_attention_heads))
    console.print()
    console.print(tabulate(size, transformer))
    for note in notes(size):
        console.print(note)


def tabulate(size, transformer):
    """A table of the model's sizes, with those of the Transformer of the same size beside them if there is one."""
    from rich import box
    from rich.table import Table

    columns = {"this model": size, "as a Transformer": transformer} if transformer else {"Transformer": size}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("parameters")
    for heading in [*columns, "share"] if transformer else columns:
        table.add_column(heading, justify="right")

    def add(name, measure, unit="", **style):
        values = [measure(column) for column in columns.values()]
        cells = [f"{value / 2**20:,.1f} MiB" if unit == "MiB" else f"{value:,}" for value in values]
        if transformer:
            cells.append(f"{values[0] / values[1]:.1%}" if values[1] else "")
        if any(values):
            table.add_row(name, *cells, **style)

    for part in size.parameters:
        add(part, lambda column, part=part: column.parameters[part])
    add("total", lambda column: column.num_parameters, end_section=True)
    table.add_row("[bold]cache of one sequence")
    add("bytes per token", lambda column: column.token_bytes)
    if any(column.windowed_token_bytes for column in columns.values()):
        add("bytes per token, windows full", lambda column: column.token_bytes - column.windowed_token_bytes)
    add("recurrent states, bytes", lambda column: column.recurrent_bytes)
    add("convolution states, bytes", lambda column: column.conv_bytes)
    for name, length in LENGTHS.items():
        add(f"at {name} tokens", lambda column, length=length: column.cache_bytes(length), "MiB")
    return table


def notes(size):
    """What the figures stand for."""
    yield f"Keys, values and convolution states are {name_of(size.dtype)}, as the weights; 1k is 1,024 tokens."
    if size.recurrent_bytes:
        yield "Recurrent states are float32; they and the convolution states don't grow with the length."
    # Keys and values of a head are at least two elements.
    if size.token_bytes == size.dtype.itemsize:
        yield "No head is full attention: one mark per token is kept, to count positions."


def name_of(dtype):
    """A dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")
