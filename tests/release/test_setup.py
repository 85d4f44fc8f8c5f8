"""`make setup` names what a machine lacks. `make test` needs nothing of `make setup-dev`. The changelog is in order."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


ROOT = Path(__file__).parents[2]
OLD = """#!/bin/sh
exec {python} -c 'import sys; sys.version_info, sys.version = (3, 10, 12), "3.10.12"; exec(sys.argv[1])' "$2"
"""
"""A Python that says that it is another one, for `python -c CODE`."""


def refusal(folder: Path, python: str, **variables: str) -> str:
    """What `make setup` says when it does not begin."""
    command = ["make", "setup", f"VENV={folder / 'venv'}", f"PYTHON={python}"]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert not (folder / "venv").exists()
    return done.stderr.splitlines()[0]


def test_a_python_that_is_not_there_too_old_or_makes_no_environments(tmp_path: Path) -> None:
    needed = "Djinn needs Python 3.11 or newer. If it has another name here: make setup PYTHON=python3.12"
    assert refusal(tmp_path, "python9") == f"There is no python9 here. {needed}"
    old = tmp_path / "python3"
    old.write_text(OLD.format(python=sys.executable))
    old.chmod(0o755)
    assert refusal(tmp_path, str(old)).startswith(f"{old} is 3.10.12. Djinn needs Python 3.11 or newer.")
    (tmp_path / "ensurepip.py").write_text("raise ModuleNotFoundError")  # as Debian is without python3-venv
    said = refusal(tmp_path, sys.executable, PYTHONPATH=str(tmp_path))
    assert said.endswith("On Debian and Ubuntu: apt-get install python3-venv")


WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in {left_out} else self.finder.find_spec(name, *rest)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
"""As if these modules were not installed."""
PYTEST = "import pytest\nsys.exit(pytest.main(sys.argv[1:]))"


def installed_by(extra: str) -> set[str]:
    """The packages that an installation with the extra has."""
    there: set[str] = set()
    waiting = [Requirement(f"djinn-server[{extra}]")]
    seen = set()
    while waiting:
        asked = waiting.pop()
        key = (canonicalize_name(asked.name), frozenset(asked.extras))
        if key in seen:
            continue
        seen.add(key)
        there.add(key[0])
        with suppress(PackageNotFoundError):  # required for another platform only
            for need in map(Requirement, requires(asked.name) or ()):
                extras = ("", *asked.extras)
                if need.marker is None or any(need.marker.evaluate({"extra": each}) for each in extras):
                    waiting.append(need)
    return there


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_make_test_collects_needs_no_package_of_setup_dev() -> None:
    kept = installed_by("test")
    left_out = {
        module
        for module, packages in packages_distributions().items()
        if not kept & {canonicalize_name(package) for package in packages} and module not in sys.stdlib_module_names
    }
    assert {"schemathesis", "playwright", "mypy"} <= left_out
    program = WITHOUT.replace("{left_out}", repr(left_out))
    command = [sys.executable, "-c", program + PYTEST, "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    passed_over = re.findall(r"^SKIPPED \[\d+\] .*: (.*)$", done.stdout, re.MULTILINE)
    assert {reason.rpartition(": ")[2] for reason in passed_over} <= {
        "make setup-dev installs it",
        "Triton is not installed",  # it is for Linux on x86-64
    }


def test_the_changelog_begins_with_what_is_not_released_and_goes_back_in_time() -> None:
    first, *released = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert first == "[Unreleased]"
    found = [re.fullmatch(r"\[([\d.]+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in released]
    assert None not in found, released
    versions = [(Version(each[1]), date.fromisoformat(each[2])) for each in found if each is not None]
    assert versions == sorted(versions, reverse=True)
