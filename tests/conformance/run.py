"""Runs transformers' own common tests on the zoo's classes: `make conformance`, or `python tests/conformance/run.py`.

The tests come from the source distribution of the transformers version that constraints.txt names; nothing of them is
kept in this repository. Arguments are passed on to pytest (`-k HwH`, `-x`).
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CACHE = ROOT / ".cache" / "conformance"


def main():
    version = re.search(r"^transformers==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    if (installed := metadata.version("transformers")) != version:
        sys.exit(f"constraints.txt names transformers {version}, but {installed} is installed")
    source = fetch_tests(version)
    models = CACHE / "tiny_models"
    # Set before the first import of transformers; worker and rank processes inherit them.
    os.environ.update(
        HF_HUB_OFFLINE="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        TRANSFORMERS_TINY_MODEL_PATH=str(models),
        PYTHONPATH=os.pathsep.join([str(source), str(HERE)]),
    )
    sys.path[:0] = [str(source), str(HERE)]
    os.chdir(source)

    import pytest
    from family_table import FAMILIES
    from pipelines import write_tiny_models

    write_tiny_models(models, FAMILIES)
    outcomes = Outcomes()
    options = ["-q", "-n2", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(source), "--disable-warnings"]
    code = pytest.main([*options, "--tb=short", *sys.argv[1:], str(HERE / "testers.py")], plugins=[outcomes])
    outcomes.print_reasons()
    if sys.argv[1:] or not outcomes.tests:
        sys.exit(code)
    sys.exit(outcomes.print_verdict([family.name for family in FAMILIES]))


def fetch_tests(version):
    """The folder that holds the `tests` package of transformers `version`, fetched once, with our stand-ins in it."""
    source = CACHE / f"transformers-{version}"
    if not source.exists():
        print(f"fetching the source distribution of transformers {version}")
        partial = CACHE / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        download = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-binary", "transformers"]
        subprocess.run([*download, "-d", str(partial), f"transformers=={version}"], check=True)
        with tarfile.open(partial / f"transformers-{version}.tar.gz") as archive:
            members = [member for member in archive if "/tests/" in member.name]
            archive.extractall(partial, members, filter="data")
        (partial / source.name).rename(source)
        shutil.rmtree(partial)
    shutil.copytree(HERE / "missing", source / "tests", dirs_exist_ok=True)
    for package in (source / "tests", *(path for path in (source / "tests").iterdir() if path.is_dir())):
        (package / "__init__.py").touch()
    # The mixins look for the library's own source beside the tests, and take what is imported already.
    (source / "src" / "transformers").mkdir(parents=True, exist_ok=True)
    (source / "src" / "transformers" / "__init__.py").touch()
    return source


class Outcomes:
    """A pytest plugin that keeps each test's outcome, with the reason for a failure or a skip."""

    def __init__(self):
        self.tests = defaultdict(dict)

    def pytest_runtest_logreport(self, report):
        family, test = re.search(r"::(\w+)ModelTest::(.+)", report.nodeid).groups()
        is_subtest = hasattr(report, "context")
        is_verdict = not is_subtest and (report.when == "call" or report.skipped)
        if report.failed or (is_verdict and self.tests[test].get(family, ("",))[0] != "failed"):
            self.tests[test][family] = (report.outcome, reason(report, family))

    def print_reasons(self):
        for outcome in ("failed", "skipped"):
            by_reason = defaultdict(list)
            for test, results in sorted(self.tests.items()):
                for why in {why for its_outcome, why in results.values() if its_outcome == outcome}:
                    names = sorted(family for family, result in results.items() if result == (outcome, why))
                    by_reason[", ".join(names), why].append(test)
            print(f"\n{outcome.capitalize()}, by reason")
            for (names, why), tests in sorted(by_reason.items(), key=lambda item: (item[0][0], -len(item[1]))):
                print(f"  {names}: {why}\n      {', '.join(tests)}")

    def print_verdict(self, families):
        """Prints the counts; returns 1 if a family fails a test, or skips more than the first of them, else 0."""
        counts = {name: Counter(results[name][0] for results in self.tests.values()) for name in families}
        print(f"\n{'':12} {'passed':>8} {'failed':>8} {'skipped':>8}")
        for name, count in counts.items():
            print(f"{name:12} {count['passed']:8} {count['failed']:8} {count['skipped']:8}")
        yardstick, *ours = families
        worse = 0
        for name in ours:
            holds = not counts[name]["failed"] and counts[name]["skipped"] <= counts[yardstick]["skipped"]
            claim = f"No failure is ours, and {name} skips no more than {yardstick} does."
            print(claim if holds else f"Does not hold: {claim}")
            worse |= not holds
        return worse


def reason(report, family):
    """One line: why a test was skipped, or the error that failed it. The family's name is left out, to group by."""
    if report.skipped:
        text = report.longrepr[2].removeprefix("Skipped: ")
        text = re.sub(
            r".* is not in `self.pipeline_model_mapping`.*", "no class of the family serves the pipeline", text
        )
        return re.sub(rf"<class '[^']*'>|{family}Model", "the model", text)
    if report.failed:
        return re.sub(r":\s*\n\s*", ": ", report.longrepr.reprcrash.message).splitlines()[0]
    return None


if __name__ == "__main__":
    main()
