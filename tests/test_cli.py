"""The frame of the command line: what every command shares. The commands' own tests lie with what they call."""

import json
import os
import subprocess
import sys
from importlib import metadata
from types import ModuleType

import pytest
import typer
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors import SafetensorError
from typer.testing import CliRunner

from hf_hybrid.cli.main import COMMANDS, app, explain


@pytest.fixture
def invoke(monkeypatch):
    """Runs `hf-hybrid ARGS` with a stand-in for `analyze` that takes a model and an option, and raises `error`."""

    def run(*args, error=None):
        def analyze(model: str, windows: int = 8):
            typer.echo(f"analyzed {model} in {windows} windows")
            if error is not None:
                raise error

        module = ModuleType("hf_hybrid.cli.analyze")
        module.analyze = analyze
        monkeypatch.setitem(sys.modules, "hf_hybrid.cli.analyze", module)
        return CliRunner().invoke(app, args, prog_name="hf-hybrid")

    return run


def test_help_lists_every_command_and_imports_none():
    """In a process of its own, since another test may have imported anything."""
    code = """
import json, sys
import hf_hybrid
before = set(sys.modules)
from hf_hybrid.cli.main import main
try:
    main()
except SystemExit as end:
    print(json.dumps([end.code, sorted(set(sys.modules) - before)]), file=sys.stderr)
"""
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    for name, line in COMMANDS.items():
        assert any(name in row and line in row for row in done.stdout.splitlines()), name
    exit_code, imported = json.loads(done.stderr.splitlines()[-1])
    assert exit_code == 0
    assert {name for name in imported if name.startswith("hf_hybrid.")} == {"hf_hybrid.cli", "hf_hybrid.cli.main"}
    assert not {name.partition(".")[0] for name in imported} & {"torch", "transformers", "matplotlib", "datasets"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    done = CliRunner().invoke(app, [name, "--help"], prog_name="hf-hybrid", terminal_width=200)
    assert done.exit_code == 0, done.output
    assert f"Usage: hf-hybrid {name}" in done.output
    assert COMMANDS[name] in " ".join(done.output.split())


def test_version_names_the_libraries(invoke):
    output = invoke("--version").output
    for package in ("hf-hybrid", "transformers", "torch"):
        assert f"{package} {metadata.version(package)}" in output


def test_command_gets_its_arguments(invoke):
    done = invoke("analyze", "some/model", "--windows", "3")
    assert (done.exit_code, done.output) == (0, "analyzed some/model in 3 windows\n")


@pytest.mark.parametrize(
    "args",
    [
        ["nothing"],
        ["analyze"],
        ["analyze", "model", "--windows", "few"],
        ["analyze", "model", "--unknown"],
        ["--unknown"],
    ],
    ids=["command", "argument", "value", "option", "global-option"],
)
def test_usage_errors_exit_with_2(invoke, args):
    done = invoke(*args)
    assert done.exit_code == 2
    assert "Error" in done.stderr
    assert "analyzed" not in done.output


class DomainError(ValueError):
    pass


@pytest.mark.parametrize(
    "error",
    [
        DomainError("layer 3: head 9 is\nnot one of 0..8"),
        FileNotFoundError(2, "No such file or directory", "map.safetensors"),
        SafetensorError("header too large"),
        StrictDataclassFieldValidationError("head_dim", TypeError("expected int, got str")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_that_a_user_can_mend_are_one_line(invoke, error):
    done = invoke("analyze", "model", error=error)
    assert done.exit_code == 1
    assert done.stderr == f"Error: {' '.join(str(error).split())}\n"


def test_debug_keeps_the_traceback(invoke, monkeypatch):
    error = DomainError("bad map")
    assert invoke("--debug", "analyze", "model", error=error).exception is error
    monkeypatch.setenv("HF_HYBRID_DEBUG", "1")
    assert invoke("analyze", "model", error=error).exception is error


def test_other_errors_keep_their_traceback(invoke):
    error = ZeroDivisionError("division by zero")
    assert invoke("analyze", "model", error=error).exception is error


@pytest.mark.parametrize(
    ("message", "extra"),
    [
        ("No module named 'matplotlib'", "report"),
        ("No module named 'matplotlib.pyplot'", "report"),
        ("No module named 'lm_eval'", "eval"),
        ("Loading a checkpoint requires GGUF>=0.10.0 to be installed.", "demo"),
    ],
)
def test_missing_package_names_its_extra(invoke, message, extra):
    done = invoke("analyze", "model", error=ImportError(message))
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert f"pip install 'hf-hybrid[{extra}]'" in done.stderr


def test_other_import_errors_are_not_explained():
    assert explain(ImportError("cannot import name 'x' from 'hf_hybrid.decoder'")) is None
