"""`hf-hybrid depth`: does a model's MLP need its width in late layers? A figure and a table."""

from pathlib import Path
from typing import Annotated

import typer


def depth(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or a .gguf file; any decoder of transformers.")],
    text: Annotated[Path | None, typer.Option(help="UTF-8 text; without it, Python's own documentation.")] = None,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("depth"),
    windows: Annotated[int, typer.Option(min=1, help="Windows of the text.")] = 8,
    window_length: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing page.")] = False,
    gguf_file: Annotated[str | None, typer.Option(help="Which .gguf file of the folder or repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of a hub repository.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
) -> None:
    """Measure the cosine of MLP output and residual stream in every layer."""
    from hf_hybrid.conversion.files import require_place, write_json

    require_place(out / "index.html", overwrite=overwrite, remedy="pass --overwrite")
    from rich.progress import Progress

    from hf_hybrid.cli.analyze import advance
    from hf_hybrid.conversion.depth_asymmetry import draw, mlp_alignment
    from hf_hybrid.conversion.picture_page import write_page
    from hf_hybrid.conversion.source_model import load_source
    from hf_hybrid.conversion.text_data import check_context, even_windows, load_text, text_digest, tokenize

    content = load_text(text)
    loaded, tokenizer = load_source(model, gguf_file=gguf_file, revision=revision, device=device)
    check_context(window_length, loaded.config, "window-length")
    tokens = even_windows(tokenize(tokenizer, content), window_length, windows, tokenizer=tokenizer)
    with Progress() as bar:
        alignment = mlp_alignment(loaded, tokens, progress=advance(bar, "windows"))
    name = loaded.config.name_or_path
    facts = {
        "Model": name,
        "Text (sha256)": text_digest(content),
        "Windows": f"{windows} of {window_length} tokens",
        "Correlation with depth": f"{alignment.depth_correlation:.3f}",
    }
    # A generator, so that the picture is drawn in the page's style.
    pictures = (draw(measured, name) for measured in [alignment])
    page, *_ = write_page(out, f"MLP output and residual stream of {name}", facts, pictures)
    values = {"cosine": alignment.cosine.tolist(), "relative_norm": alignment.relative_norm.tolist()}
    write_json(out / "depth_asymmetry.json", {**facts, **values})
    for layer, cosine in enumerate(values["cosine"]):
        typer.echo(f"layer {layer:3d}  cosine {cosine:+.3f}")
    typer.echo(f"correlation with depth {alignment.depth_correlation:+.3f}")
    typer.echo(f"wrote {page}")
