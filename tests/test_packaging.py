"""What `pip install` puts where: folders that stand beside `hf_hybrid` are installed inside it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
INSTALLED_AS = {
    "hf_hybrid": "hf_hybrid",
    "conversion": "hf_hybrid/conversion",
    "training": "hf_hybrid/training",
    "eval": "hf_hybrid/eval",
    "cli": "hf_hybrid/cli",
}


def test_wheel_holds_every_module_under_its_installed_name(tmp_path):
    """Built from a copy, since setuptools leaves its intermediate files beside the sources."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for folder in INSTALLED_AS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)

    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    modules = {name for name in names if name.endswith((".py", ".yaml"))}
    expected = {
        f"{installed}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, installed in INSTALLED_AS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml")
    }
    assert modules == expected
    assert {f"{installed}/__init__.py" for installed in INSTALLED_AS.values()} <= modules
    assert "hf-hybrid = hf_hybrid.cli.main:main" in entry_points
