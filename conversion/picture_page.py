"""A page of pictures for a browser, and each picture as PNG and SVG for a paper."""

import base64
import html
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from hf_hybrid.conversion.files import write_atomically

# Told apart by colour-blind readers (Okabe and Ito).
BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#000000"),
)
STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 200,
    # With fixed ids the same results give the same file.
    "svg.hashsalt": "hf_hybrid",
}


@dataclass(frozen=True)
class Picture:
    """A figure with the stem of its files' names, and the title and caption of the page."""

    stem: str
    title: str
    caption: str
    figure: Figure


def write_page(
    folder: str | Path, title: str, facts: Mapping[str, object], pictures: Iterable[Picture], *, head="", tail=""
) -> list[Path]:
    """Writes `index.html`, which needs no other file, and each picture as PNG and SVG beside it.

    Args:
        folder: made if absent; existing files of these names are replaced.
        title: of the page.
        facts: rows of the table below the title; those without a value are left out.
        pictures: drawn here, in this module's style, if they are a generator.
        head, tail: HTML before and after the pictures.

    Returns:
        The written paths, the page first.
    """
    folder, written, sections = Path(folder), [], []
    with matplotlib.rc_context(STYLE):
        for picture in pictures:
            for suffix in ("png", "svg"):
                image = _render(picture.figure, suffix)
                written.append(folder / f"{picture.stem}.{suffix}")
                write_atomically(written[-1], image)
            sections.append(_section(picture, svg=image))
    page = folder / "index.html"
    write_atomically(page, _page(title, facts, "\n".join([head, *sections, tail])).encode())
    return [page, *written]


def _render(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    # Without a date the same results give the same file.
    figure.savefig(buffer, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
    return buffer.getvalue()


def _section(picture: Picture, *, svg: bytes) -> str:
    image = base64.b64encode(svg).decode()
    title, caption = html.escape(picture.title), html.escape(picture.caption)
    links = " ".join(f'<a href="{picture.stem}.{suffix}">{suffix.upper()}</a>' for suffix in ("png", "svg"))
    return f"""<section>
<h2>{title}</h2>
<figure>
<img src="data:image/svg+xml;base64,{image}" alt="{title}">
<figcaption>{caption} <span class="links">{links}</span></figcaption>
</figure>
</section>"""


def _page(title: str, facts: Mapping[str, object], body: str) -> str:
    rows = "\n".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in facts.items()
        if value
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<table>
{rows}
</table>
{body}
</body>
</html>
"""


CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 880px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 0.6rem; }
table { border-collapse: collapse; font-size: 0.9rem; }
th { text-align: left; font-weight: 600; padding: 0.15rem 1.5rem 0.15rem 0; vertical-align: top; white-space: nowrap; }
td { padding: 0.1rem 1.2rem 0.1rem 0; overflow-wrap: anywhere; }
.scores td:nth-child(n+2), .scores th:nth-child(n+2) { text-align: right; font-variant-numeric: tabular-nums; }
.scores tr:nth-child(even) { background: #f5f5f5; }
figure { margin: 0; }
img { max-width: 100%; height: auto; }
figcaption { font-size: 0.9rem; color: #444; margin-top: 0.4rem; }
.links { white-space: nowrap; }
"""
