"""Evaluation: does a model retrieve, does it extrapolate, and from which length on does it break."""

from pathlib import Path

TASKS = Path(__file__).parent / "tasks"
"""The folder for `lm_eval --include_path`."""
