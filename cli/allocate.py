"""`hf-hybrid allocate`: head map + budget -> the full-attention heads of every layer."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_hybrid.cli.options import SEEDS

Strategy = StrEnum("Strategy", ["rpd", "inverted", "random", "uniform", "layerwise", "scores"])
Granularity = StrEnum("Granularity", ["kv_group", "query_head"])

CACHE_BYTES_PER_ELEMENT = 2  # bfloat16


def allocate(
    map: Annotated[Path, typer.Argument(help="Head map: .safetensors, DuoAttention's .tsv or Retrieval_Head's .json.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write.")] = Path("heads.json"),
    fa_share: Annotated[float, typer.Option(help="Share of units that stay full attention, 0 .. 1.")] = 0.25,
    strategy: Annotated[Strategy, typer.Option(help="How units are chosen.")] = Strategy.rpd,
    granularity: Annotated[Granularity, typer.Option(help="What one unit is.")] = Granularity.kv_group,
    min_per_layer: Annotated[int, typer.Option(help="Fewest units in any layer.")] = 0,
    max_per_layer: Annotated[int | None, typer.Option(help="Most units in any layer.")] = None,
    seed: Annotated[int, typer.Option(**SEEDS, help="Seed of the strategy random.")] = 0,
    period: Annotated[int | None, typer.Option(help="layerwise: every period-th layer, whatever the share.")] = None,
    num_attention_heads: Annotated[int | None, typer.Option(help="Query heads a layer; a .tsv needs it.")] = None,
    num_key_value_heads: Annotated[int | None, typer.Option(help="KV heads a layer; a .json needs it.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Choose which heads stay full attention, from a head map and a budget."""
    from hf_hybrid.conversion.files import require_place

    require_place(out, overwrite=overwrite, remedy="pass --overwrite")
    from hf_hybrid.conversion.allocate import allocate as choose
    from hf_hybrid.conversion.head_map import load_head_map

    head_map = load_head_map(map, num_attention_heads=num_attention_heads, num_key_value_heads=num_key_value_heads)
    allocation = choose(
        head_map,
        full_attention_share=fa_share,
        strategy=strategy.value,
        granularity=granularity.value,
        minimum_per_layer=min_per_layer,
        maximum_per_layer=max_per_layer,
        seed=seed,
        period=period,
    )
    allocation.save(out)
    typer.echo(describe(allocation, head_map.metadata.get("head_dim")))
    typer.echo(f"wrote {out}")


def describe(allocation, head_dim: int | None) -> str:
    """What was chosen, the map of heads, and the cache cost per token against the source (bytes need head_dim)."""
    from hf_hybrid.conversion.allocate import cache_bytes_per_token, cached_key_value_heads, draw_heads

    model = allocation.num_attention_heads, allocation.num_key_value_heads
    chosen = allocation.full_attention_heads
    every = [list(range(allocation.num_attention_heads)) for _ in chosen]
    unit = {"kv_group": "KV groups", "query_head": "query heads"}[allocation.settings["granularity"]]
    cached, total = (cached_key_value_heads(heads, *model) for heads in (chosen, every))
    cache = f"cache per token: {cached} of {total} KV heads, {cached / total:.1%} of the source's"
    if head_dim is not None:
        cached, total = (
            cache_bytes_per_token(heads, *model, head_dim, CACHE_BYTES_PER_ELEMENT) for heads in (chosen, every)
        )
        cache += f" ({cached:,} of {total:,} bytes in bfloat16)"
    return f"""\
{allocation.model}, strategy {allocation.settings["strategy"]}
{allocation.full_attention_units} of {allocation.units} {unit} stay full attention: {allocation.share:.1%} \
(asked: {allocation.settings["full_attention_share"]:.1%})

layer, query heads (# full attention, . linear), number of full-attention heads:
{draw_heads(chosen, allocation.num_attention_heads)}

{cache}"""
