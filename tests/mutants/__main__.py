"""Plants each fault in a clone of the last commit and runs the tests: `python -m tests.mutants [--all] [NAME ...]`."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATCHES = Path(__file__).parent
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
SEPARATE = "not clients and not frameworks and not browser and not wheel and not rare"
"""Tests that install something or need a browser: none of the faults is theirs."""
NO_TESTS = 5
"""pytest's exit status where all tests of the folders are `long`."""


@dataclass(frozen=True)
class Mutant:
    """A patch, the sentence that says what it breaks, and the folders of the tests that are tried first."""

    path: Path
    says: str
    nearest: list[str]

    @classmethod
    def read(cls, path: Path) -> Mutant:
        """Raises ValueError for a patch without its two first lines."""
        says, tests, *_ = path.read_text().splitlines()
        nearest = tests.removeprefix("Tests: ").split()
        if not tests.startswith("Tests: ") or not all((ROOT / each).exists() for each in nearest):
            raise ValueError(f"{path.name}: its second line must be `Tests:` and folders that exist")
        return cls(path, says, nearest)


def catch(mutant: Mutant, tree: Path, options: list[str]) -> str | None:
    """The first test that fails with the fault in `tree`; None: all pass. The tree is as before afterwards."""
    apply = ["git", "-C", str(tree), "apply"]
    subprocess.run([*apply, str(mutant.path)], check=True)
    try:
        return _first_failure(tree, options, mutant.nearest) or _first_failure(tree, options, [])
    finally:
        subprocess.run([*apply, "--reverse", str(mutant.path)], check=True)


def _first_failure(tree: Path, options: list[str], paths: list[str]) -> str | None:
    told = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--exitfirst", "--quiet", "--numprocesses", "logical", *options, *paths]
    done = subprocess.run(command, cwd=tree, env=told, capture_output=True, text=True)
    if done.returncode in (0, NO_TESTS):
        return None
    if (found := FAILED.search(done.stdout)) is None:
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return found[1]


def main() -> int:
    """Exit status 1 if a fault was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--all", action="store_true", help="run the tests of `make test-all`")
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of patches (default: all of them)")
    arguments = parser.parse_args()
    options = ["-m", SEPARATE, "--hypothesis-profile", "full"] if arguments.all else []
    paths = [PATCHES / f"{name}.patch" for name in arguments.names] or sorted(PATCHES.glob("*.patch"))
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "djinn"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
        for number, path in enumerate(paths, 1):
            mutant, began = Mutant.read(path), time.monotonic()
            caught = catch(mutant, tree, options)
            survivors += caught is None
            outcome = "SURVIVES" if caught is None else f"caught by {caught}"
            print(f"[{number}/{len(paths)}] {path.stem}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(paths) - survivors} of {len(paths)} caught")
    return int(survivors > 0)


if __name__ == "__main__":
    raise SystemExit(main())
