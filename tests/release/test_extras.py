"""`make setup` installs all that `make test` imports, also where `make setup-dev` has installed more."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DJINN = "djinn-server"
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
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
"""pytest as if these modules were not installed."""


def installed_by(extra: str) -> set[str]:
    """The packages that an installation with the extra has."""
    there: set[str] = set()
    waiting = [Requirement(f"{DJINN}[{extra}]")]
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
    command = [sys.executable, "-c", program, "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    passed_over = re.findall(r"^SKIPPED \[\d+\] .*: (.*)$", done.stdout, re.MULTILINE)
    assert {reason.rpartition(": ")[2] for reason in passed_over} <= {
        "make setup-dev installs it",
        "Triton is not installed",  # it is for Linux on x86-64
    }
