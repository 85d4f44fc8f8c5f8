"""Each fault can still be planted: a change of the code that it breaks changes the patch too."""

import subprocess
from pathlib import Path

import pytest

from tests.mutants.__main__ import PATCHES, ROOT, Mutant


@pytest.mark.parametrize("path", sorted(PATCHES.glob("*.patch")), ids=lambda path: path.stem)
def test_it_applies_and_names_tests_that_exist(path: Path) -> None:
    assert Mutant.read(path).says.endswith(".")
    checked = subprocess.run(["git", "apply", "--check", str(path)], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
