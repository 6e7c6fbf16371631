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
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        TRANSFORMERS_TINY_MODEL_PATH=str(models),
        PYTHONPATH=os.pathsep.join([str(source), str(HERE)]),
    )
    sys.path[:0] = [str(source), str(HERE)]
    os.chdir(source)

    import pytest
    from families import FAMILIES
    from pipelines import write_tiny_models

    write_tiny_models(models, FAMILIES)
    outcomes = Outcomes()
    options = ["-q", "-n2", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(source), "--disable-warnings"]
    code = pytest.main([*options, "--tb=short", *sys.argv[1:], str(HERE / "testers.py")], plugins=[outcomes])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(code)
    sys.exit(outcomes.print_summary(FAMILIES))


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
    """A pytest plugin that keeps each test's outcome and the reason for a failure or a skip."""

    def __init__(self):
        self.tests = defaultdict(dict)

    def pytest_runtest_logreport(self, report):
        name, test = re.search(r"::(\w+)ModelTest::(.+)", report.nodeid).groups()
        if report.when == "call" or report.outcome != "passed":
            self.tests[name][test] = (report.outcome, reason(report))

    def print_summary(self, families):
        """Prints what failed and what was skipped, and why; the exit code is 0 if no family fares worse than the first."""
        yardstick, *ours = (family.name for family in families)
        for name, tests in self.tests.items():
            for outcome in ("failed", "skipped"):
                reasons = defaultdict(list)
                for test, (its_outcome, why) in sorted(tests.items()):
                    if its_outcome == outcome:
                        reasons[why].append(test)
                print(f"\n{name}: {sum(map(len, reasons.values()))} {outcome}")
                for why, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
                    print(f"  {why}\n    {', '.join(names)}")
        print()
        counts = {name: Counter(outcome for outcome, _ in tests.values()) for name, tests in self.tests.items()}
        for name, count in counts.items():
            print(f"{name:12} {count['passed']:4} passed {count['failed']:4} failed {count['skipped']:4} skipped")
        worse = [
            name
            for name in ours
            if counts[name]["failed"] or counts[name]["skipped"] > counts[yardstick]["skipped"]
        ]
        for name in ours:
            print(
                f"No failure is {name}'s, and it skips no more than {yardstick} does."
                if name not in worse
                else f"{name} fails a test or skips more than {yardstick} does."
            )
        return len(worse)


def reason(report):
    """One line: why a test was skipped, or the error that failed it."""
    if report.outcome == "skipped":
        return report.longrepr[2].removeprefix("Skipped: ")
    if report.outcome == "failed":
        return report.longrepr.reprcrash.message.splitlines()[0]
    return None


if __name__ == "__main__":
    main()
