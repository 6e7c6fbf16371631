"""The report of a head map: pictures for a paper (PNG and SVG) and one self-contained page that shows them."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from hf_hybrid.conversion.allocate import Allocation, AllocationError
from hf_hybrid.conversion.head_map import HeadMap
from hf_hybrid.conversion.head_scores import gpband
from hf_hybrid.conversion.picture_page import BLUE, VERMILION, Picture, write_page

CLASS_COLORS = {"retrieval": BLUE, "mid": "#A0A0A0", "positional": VERMILION}
LINEAR_TO_FULL = LinearSegmentedColormap.from_list("linear_to_full", ["#E4E4E4", BLUE])
COLORMAP = "viridis"
WIDTH = 7.0  # inches, the text width of a one-column paper

SCORES = {"hf_hybrid": "RPD", "duo_attention": "1 - gate value", "retrieval_head": "1 - retrieval score"}
TOOLS = {"hf_hybrid": "hf-hybrid", "duo_attention": "DuoAttention", "retrieval_head": "Retrieval_Head"}
UNIT_NAMES = {"kv_group": "KV group", "query_head": "query head"}
BITS_OR_NATS = {"js": " (bits)", "kl": " (nats)", "tv": ""}


def write_report(head_map: HeadMap, out_dir: str | Path, allocation: Allocation | None = None) -> list[Path]:
    """Write `index.html`, which needs no other file, and each of its pictures as PNG and SVG beside it.

    What the map does not hold (RFIS, in an imported map) is named on the page with the reason.

    Returns:
        The written paths, the page first. Existing ones are replaced.

    Raises:
        AllocationError: if the allocation is for another number of layers or heads than the map.
    """
    if allocation is not None:
        _check_same_model(head_map, allocation)
    title = f"Head map of {Path(head_map.metadata['model']).name}"
    missing = "".join(f"<li>{html.escape(line)}</li>" for line in _missing(head_map, allocation))
    tail = f"<section><h2>Not on this page</h2><ul>{missing}</ul></section>" if missing else ""
    return write_page(out_dir, title, _facts(head_map), pictures(head_map, allocation), tail=tail)


def natural_classes(values: np.ndarray) -> tuple[float, float] | None:
    """The two cuts that split `values` into three classes of least total squared deviation (Fisher, 1958), exactly.

    None if there are fewer than three distinct values.
    """
    ordered = np.sort(values, axis=None).astype(np.float64)
    n = len(ordered)
    if len(np.unique(ordered)) < 3:
        return None
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    # Least squared deviation within classes is most squared sum over size: one term for each class.
    best, cuts = -np.inf, (1, 2)
    for first in range(1, n - 1):
        second = np.arange(first + 1, n)
        gain = sums[first] ** 2 / first
        gains = (sums[second] - sums[first]) ** 2 / (second - first) + (sums[n] - sums[second]) ** 2 / (n - second)
        if gain + gains.max() > best:
            best, cuts = gain + gains.max(), (first, int(second[gains.argmax()]))
    low, high = ((ordered[cut - 1] + ordered[cut]) / 2 for cut in cuts)
    return float(low), float(high)


def _check_same_model(head_map: HeadMap, allocation: Allocation) -> None:
    for name, here, there in (
        ("layers", head_map.num_layers, len(allocation.full_attention_heads)),
        ("num_attention_heads", head_map.metadata["num_attention_heads"], allocation.num_attention_heads),
        ("num_key_value_heads", head_map.metadata["num_key_value_heads"], allocation.num_key_value_heads),
    ):
        if here != there:
            raise AllocationError(f"the allocation has {name} {there} ({allocation.model}), the head map has {here}")


def pictures(head_map: HeadMap, allocation: Allocation | None = None) -> Iterator[Picture]:
    """The pictures that the map holds the scores for, in the order of the page."""
    yield _rpd_by_layer(head_map)
    if "rfis" in head_map.tensors:
        yield _rfis_by_rpd(head_map, allocation)
        yield _band(head_map)
    yield _classes(head_map, allocation)
    if allocation is not None:
        yield _allocation_map(head_map, allocation)


def _score_label(head_map: HeadMap) -> str:
    divergence = head_map.metadata["settings"].get("divergence")
    return SCORES[head_map.metadata["source"]] + BITS_OR_NATS.get(divergence, "")


def _column_name(head_map: HeadMap) -> str:
    return UNIT_NAMES[head_map.metadata["granularity"]]


def _full_attention(allocation: Allocation, columns: int) -> np.ndarray:
    """The share of full-attention query heads in each of the columns of every layer, [L, columns]."""
    layers = len(allocation.full_attention_heads)
    chosen = np.zeros((layers, allocation.num_attention_heads))
    for layer, heads in enumerate(allocation.full_attention_heads):
        chosen[layer, heads] = 1
    return chosen.reshape(layers, columns, -1).mean(axis=2)


def _head_grid(axes: Axes, columns: int, group_size: int, name: str) -> None:
    """Labels an image with layers to the right and heads downwards; lines keep KV groups apart."""
    axes.set_xlabel("layer")
    axes.set_ylabel(name)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if group_size > 1:
        for edge in range(group_size, columns, group_size):
            axes.axhline(edge - 0.5, color="white", linewidth=1)


def _grid_height(columns: int) -> float:
    return min(max(0.2 * columns, 1.0), 6.0)


def _rpd_by_layer(head_map: HeadMap) -> Picture:
    rpd = head_map.rpd.numpy()
    layers, columns = rpd.shape
    name, label = _column_name(head_map), _score_label(head_map)
    figure = Figure(figsize=(WIDTH, _grid_height(columns) + 0.8), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(rpd.T, aspect="auto", cmap=COLORMAP, vmin=0, interpolation="nearest")
    group_size = head_map.group_size if head_map.metadata["granularity"] == "query_head" else 1
    _head_grid(axes, columns, group_size, name)
    figure.colorbar(image, ax=axes, label=label, pad=0.02)
    quartiles = ", ".join(f"{value:.3f}" for value in np.quantile(rpd, [0.25, 0.5, 0.75]))
    caption = (
        f"{label} of the {rpd.size} {name}s of {layers} layers. Low (dark): retrieval; high (bright): positional."
        f" Quartiles {quartiles}; range {rpd.min():.2g} to {rpd.max():.3f}."
    )
    if group_size > 1:
        caption += f" White lines: the {group_size} query heads between two of them share a KV head."
    return Picture("rpd_by_layer", f"{SCORES[head_map.metadata['source']]} over layers and heads", caption, figure)


def _rfis_by_rpd(head_map: HeadMap, allocation: Allocation | None) -> Picture:
    layers = head_map.wavelength_layers
    rpd = head_map.rpd[layers].numpy().ravel()
    order = np.argsort(rpd, kind="stable")
    shares = _rfis_shares(head_map).flatten(0, 1).numpy()[order]
    wavelengths = head_map.tensors["wavelengths"].double().numpy()
    name, pairs = _column_name(head_map), len(wavelengths)

    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    left, strip, axes = figure.subplots(1, 3, sharey=True, width_ratios=[1.1, 0.12, 5])
    left.plot(rpd[order], np.arange(len(rpd)), color="black", linewidth=1.2)
    left.set_xlabel(_score_label(head_map))
    left.set_ylabel(f"{name}s, sorted by {SCORES[head_map.metadata['source']]}")
    left.set_xlim(left=0)
    caption = f"Each row is a {name}: its RFIS over the rotary pairs, divided by the row's sum. Lowest RPD on top."
    caption += _restriction(head_map)
    if allocation is None:
        strip.remove()
    else:
        chosen = _full_attention(allocation, head_map.rpd.shape[1])[layers].ravel()[order]
        strip.imshow(chosen[:, None], aspect="auto", cmap=LINEAR_TO_FULL, vmin=0, vmax=1, interpolation="nearest")
        strip.set_xticks([])
        strip.set_title("FA", fontsize=9)
        strip.tick_params(left=False)
        caption += " The strip marks in blue what the allocation keeps as full attention (FA)."
    # A few pairs have most of the mass: a linear scale up to the largest share would leave the others dark.
    scale = PowerNorm(0.5, vmin=0, vmax=max(np.quantile(shares, 0.995), 1e-6))
    image = axes.imshow(shares, aspect="auto", cmap=COLORMAP, norm=scale, interpolation="nearest")
    axes.set_xlabel("rotary pair")
    axes.tick_params(left=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    ticks = np.unique(np.linspace(0, pairs - 1, 6).round().astype(int))
    top = axes.secondary_xaxis("top")
    top.set_xticks(ticks, [_tokens(wavelengths[tick]) for tick in ticks])
    top.set_xlabel("wavelength (tokens)")
    length = head_map.metadata["training_length"]
    if length and wavelengths[0] <= length <= wavelengths[-1]:
        place = np.interp(np.log(length), np.log(wavelengths), np.arange(pairs))
        axes.axvline(place, color="white", linestyle="--", linewidth=1.2)
        caption += f" Dashed: the wavelength of the training length, {length:,} tokens."
    figure.colorbar(image, ax=axes, label="share of the head's RFIS (square-root scale)", pad=0.02, extend="max")
    return Picture("rfis_by_rpd", "RFIS of all heads, sorted by RPD", caption, figure)


def _rfis_shares(head_map: HeadMap) -> Tensor:
    """[layers with the map's wavelengths, H, F]: each head's RFIS over its sum, so that all heads count alike."""
    rfis = head_map.tensors["rfis"][head_map.wavelength_layers].double()
    total = rfis.sum(dim=2, keepdim=True)
    # A head whose RFIS is 0 throughout has no shares.
    return rfis / torch.where(total > 0, total, 1.0)


def _restriction(head_map: HeadMap) -> str:
    layers = head_map.wavelength_layers
    if len(layers) == head_map.num_layers:
        return ""
    return (
        f" Only the {len(layers)} of {head_map.num_layers} layers whose pairs have these wavelengths: the others rotate"
        " with other frequencies, or not at all."
    )


def _tokens(wavelength: float) -> str:
    """A number of tokens in three characters or so: 6.3, 810, 35k, 1.2M."""
    for size, suffix in ((1e6, "M"), (1e3, "k"), (1, "")):
        if wavelength >= size:
            number = wavelength / size
            return f"{number:.1f}{suffix}" if number < 9.95 else f"{number:.0f}{suffix}"
    return f"{wavelength:.2g}"


def _class_masks(rpd: np.ndarray, cuts: tuple[float, float]) -> dict[str, np.ndarray]:
    index = np.digitize(rpd, cuts)
    return {name: index == number for number, name in enumerate(CLASS_COLORS)}


def _band(head_map: HeadMap) -> Picture:
    layers = head_map.wavelength_layers
    shares, wavelengths = _rfis_shares(head_map), head_map.tensors["wavelengths"]
    length = head_map.metadata["training_length"]
    band = gpband(shares, wavelengths, length)
    low, high = band.wavelengths[0], band.wavelengths[-1]
    heads = shares.flatten(0, 1).numpy()
    x = wavelengths.double().numpy()

    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    # The band reaches half way to the next pair on either side, as each pair stands for its share of the axis.
    ratio = np.sqrt(x[1] / x[0]) if len(x) > 1 else 1.0
    axes.axvspan(low / ratio, high * ratio, color="#F0E442", alpha=0.45, linewidth=0, label="GPBand")
    cuts = natural_classes(head_map.rpd.numpy())
    if cuts is not None:
        for name, mask in _class_masks(head_map.rpd[layers].numpy().ravel(), cuts).items():
            if mask.any():
                axes.plot(x, heads[mask].mean(axis=0), color=CLASS_COLORS[name], linewidth=1.2, label=f"{name} heads")
    axes.plot(x, heads.mean(axis=0), color="black", linewidth=2, marker="o", markersize=3.5, label="all heads")
    caption = (
        "Share of a head's RFIS, mean over heads, against the wavelength of the pair. Shaded: the GPBand, pairs"
        f" {band.first} to {band.last} of {len(x)} (peak at {band.peak}), wavelengths {_tokens(low)} to"
        f" {_tokens(high)} tokens"
    )
    if length:
        axes.axvline(length, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"training length {length:,}",
            (length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4, -2),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=9,
        )
        caption += f", {low / length:.2g} to {high / length:.2g} times the training length."
    else:
        caption += "; the map does not know the training length."
    if cuts is not None:
        caption += " Thin lines: the means of the three classes of the histogram."
    caption += _restriction(head_map)
    axes.set_xlabel("wavelength (tokens)")
    axes.set_ylabel("share of a head's RFIS (mean)")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    return Picture("gpband", "Global positional band", caption, figure)


def _classes(head_map: HeadMap, allocation: Allocation | None) -> Picture:
    rpd = head_map.rpd.numpy().ravel()
    name, label = _column_name(head_map), _score_label(head_map)
    edges = np.linspace(0, max(rpd.max(), 1e-6), 41)
    centres, width = (edges[:-1] + edges[1:]) / 2, edges[1]
    cuts = natural_classes(rpd)

    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    legend = []
    if cuts is None:
        axes.hist(rpd, edges, color=CLASS_COLORS["mid"])
        caption = f"{label} of the {len(rpd)} {name}s: too few distinct values for three classes."
    else:
        below = np.zeros(len(centres))
        sizes = []
        for kind, mask in _class_masks(rpd, cuts).items():
            counts, _ = np.histogram(rpd[mask], edges)
            look = {"color": CLASS_COLORS[kind], "edgecolor": "white", "linewidth": 0.4}
            legend.append(axes.bar(centres, counts, width, below, label=kind, **look))
            below += counts
            sizes.append(f"{mask.sum()} {kind}")
        caption = (
            f"{label} of the {len(rpd)} {name}s in three classes: {', '.join(sizes)}. The cuts {cuts[0]:.3f} and"
            f" {cuts[1]:.3f} minimise the squared deviation within the classes (natural breaks, our definition)."
        )
    if allocation is not None:
        chosen = _full_attention(allocation, head_map.rpd.shape[1]).ravel()
        counts, _ = np.histogram(rpd, edges, weights=chosen)
        legend.append(axes.stairs(counts, edges, color="black", linewidth=1.2, label="kept as full attention"))
        caption += " Outlined: what the allocation keeps as full attention."
        if (cut := _allocation_cut(head_map, allocation)) is not None:
            unit = UNIT_NAMES[allocation.settings["granularity"]]
            legend.append(axes.axvline(cut, color="black", linestyle="--", linewidth=1, label=f"cut by {unit}"))
            caption += f" Dashed: its cut, at {cut:.3f} of the score of a {unit}."
    axes.set_xlabel(label)
    axes.set_ylabel(f"{name}s")
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if legend:
        figure.legend(handles=legend, loc="outside upper center", ncols=len(legend), columnspacing=1.2)
    return Picture("classes", f"Classes of heads by {SCORES[head_map.metadata['source']]}", caption, figure)


def _allocation_cut(head_map: HeadMap, allocation: Allocation) -> float | None:
    """The score half way between the units kept and the others, if the allocation is such a cut of this map."""
    if allocation.map_digest != head_map.digest():
        return None
    scores = np.array(allocation.scores)
    kept = _full_attention(allocation, scores.shape[1]) > 0
    if not kept.any() or kept.all() or scores[kept].max() > scores[~kept].min():
        return None
    return float(scores[kept].max() + scores[~kept].min()) / 2


def _allocation_map(head_map: HeadMap, allocation: Allocation) -> Picture:
    heads, settings = allocation.num_attention_heads, allocation.settings
    chosen = _full_attention(allocation, heads)
    layers = len(chosen)
    figure = Figure(figsize=(WIDTH, _grid_height(heads) + 1.8), layout="constrained")
    counts, axes = figure.subplots(2, 1, sharex=True, height_ratios=[0.9, _grid_height(heads)])
    counts.bar(range(layers), chosen.sum(axis=1), color=LINEAR_TO_FULL(1.0), width=0.8)
    counts.set_ylabel("heads")
    counts.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    counts.tick_params(labelbottom=False)
    axes.imshow(chosen.T, aspect="auto", cmap=LINEAR_TO_FULL, vmin=0, vmax=1, interpolation="nearest")
    _head_grid(axes, heads, head_map.group_size, "query head")
    for edge in range(1, layers):
        axes.axvline(edge - 0.5, color="white", linewidth=0.5)
    figure.legend(
        handles=[
            Patch(color=LINEAR_TO_FULL(1.0), label="full attention"),
            Patch(color=LINEAR_TO_FULL(0.0), label="linear"),
        ],
        loc="outside upper right",
        ncols=2,
    )
    unit = UNIT_NAMES[settings["granularity"]]
    caption = (
        f"Strategy {settings['strategy']}: {allocation.full_attention_units} of {allocation.units} {unit}s"
        f" ({allocation.share:.1%}) stay full attention; bars count the query heads of each layer."
    )
    if allocation.map_digest != head_map.digest():
        caption += f" It was made from another map ({allocation.map_digest[:12]}) than this page shows."
    return Picture("allocation", "Allocation", caption, figure)


def _missing(head_map: HeadMap, allocation: Allocation | None) -> list[str]:
    missing = []
    if "rfis" not in head_map.tensors:
        source = head_map.metadata["source"]
        reason = (
            "this map was made without it"
            if source == "hf_hybrid"
            else f"{TOOLS[source]} gives one score a head, not one a rotary pair; hf-hybrid analyze measures it"
        )
        missing.append(f"RFIS and the GPBand: {reason}.")
    if allocation is None:
        missing.append("The allocation: none was given (hf-hybrid report --heads).")
    return missing


def _facts(head_map: HeadMap) -> dict[str, Any]:
    metadata = head_map.metadata
    group = "" if head_map.group_size == 1 else f", {head_map.group_size} query heads a KV head"
    return {
        "Model": metadata["model"],
        "Revision": metadata["revision"],
        "Architecture": metadata["model_type"],
        "Heads": f"{head_map.num_layers} layers x {metadata['num_attention_heads']} query heads{group}",
        "Training length": metadata["training_length"] and f"{metadata['training_length']:,} tokens",
        "Scores by": f"{TOOLS[metadata['source']]}, one per {_column_name(head_map)}",
        "Settings": ", ".join(f"{key} {value}" for key, value in metadata["settings"].items()),
        "Text (sha256)": metadata["text_digest"],
        "Map (sha256)": head_map.digest(),
        "Written by": f"hf-hybrid {metadata['tool_version']}",
    }
