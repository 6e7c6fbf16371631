"""`hf-hybrid <command>`: finds the command, and turns errors that a user can mend into one line.

A command lives in `hf_hybrid.cli.<command>` as a function of the same name. Its module is imported when the command is
invoked, so that `hf-hybrid --help` waits for none of them.
"""

import re
from importlib import import_module, metadata
from typing import Annotated

import typer
from typer.core import TyperGroup

COMMANDS = {
    "analyze": "Measure every attention head of a RoPE model and write a head map.",
    "report": "Write a page with pictures from a head map.",
    "allocate": "Choose which heads stay full attention, from a head map and a budget.",
    "convert": "Turn a RoPE checkpoint into a head-wise hybrid one.",
    "calibrate": "Fit the output projections of a converted model in closed form.",
    "distill": "Train a converted model towards its source.",
    "ring": "Train a Mobius model as a ring of workers (started by torchrun).",
    "taper": "Turn a uniform checkpoint into one whose MLPs narrow with depth.",
    "depth": "Measure how much each layer's MLP repeats the residual stream.",
    "loop": "Apply middle layers again without training, and measure whether it helps.",
    "inspect": "Show a model's parameters, heads and cache size.",
    "eval": "Evaluate models: retrieval, extrapolation, any task of lm-eval.",
    "demo": "Run all of it on a small real checkpoint and compare the stages.",
}


class LazyGroup(TyperGroup):
    """Shows every command by its one line and imports only the one that is invoked."""

    def resolve_command(self, ctx, args):
        """Like the parent's, with the command's own signature in place of the one-line stand-in."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(name), rest

    def invoke(self, ctx):
        """Like the parent's; an error that a user can mend ends as one line on stderr and exit code 1."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            message = explain(error)
            if message is None or ctx.params["debug"]:
                raise
            typer.secho(f"Error: {message}", fg=typer.colors.RED, err=True)
            raise typer.Exit(1) from error


def load_command(name):
    """The typer command of the function `name` in the module `hf_hybrid.cli.<name>`."""
    command = typer.Typer(add_completion=False, context_settings=app.info.context_settings)
    command.command(name, help=COMMANDS[name])(getattr(import_module(f"hf_hybrid.cli.{name}"), name))
    return typer.main.get_command(command)


def explain(error):
    """One line for an error that a user can mend (a bad value or file, a missing package); None for any other."""
    if isinstance(error, BrokenPipeError):
        return None
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError):
        extra = next((extra for package, extra in optional_packages() if mentions(line, package)), None)
        return extra and f"{line}. Install it with: pip install 'hf-hybrid[{extra}]'"
    return line if isinstance(error, (ValueError, OSError, *file_format_errors())) else None


def optional_packages():
    """Pairs of an optional package's name and an extra that brings it, in the order of pyproject.toml."""
    for requirement in metadata.requires("hf-hybrid"):
        if match := re.match(r"(?!hf-hybrid)([\w-]+).*extra == ['\"]([\w-]+)", requirement):
            yield match.groups()


def mentions(line, package):
    """Whether `line` names `package`, by its distribution's name or by its module's."""
    return re.search(rf"\b{package.replace('-', '[-_]')}\b", line, re.IGNORECASE) is not None


def file_format_errors():
    """Errors about a file's content that the libraries do not derive from ValueError."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    return StrictDataclassError, SafetensorError


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def stand_in():
    """Carries a command's one line in `hf-hybrid --help`; `LazyGroup.resolve_command` replaces it."""


for _name, _line in COMMANDS.items():
    app.command(_name, help=_line)(stand_in)


def show_version(wanted: bool):
    """Prints the versions that matter and ends."""
    if wanted:
        libraries = ", ".join(f"{name} {metadata.version(name)}" for name in ("transformers", "torch"))
        typer.echo(f"hf-hybrid {metadata.version('hf-hybrid')} ({libraries})")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="HF_HYBRID_DEBUG", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
):
    """Hybrid language models for transformers: measure a checkpoint's heads, convert it, heal it."""


def main():
    """The console script."""
    app(prog_name="hf-hybrid")
