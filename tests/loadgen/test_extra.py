"""The load generator where only the server's packages are installed."""

import subprocess
import sys

import pytest

from loadgen.__main__ import EXTRA

BARE = """
import runpy, sys
sys.modules[sys.argv[1]] = None
sys.argv = ["loadgen", "--help"]
runpy.run_module("loadgen", run_name="__main__")
"""


@pytest.mark.parametrize("missing", EXTRA)
def test_a_missing_package_is_answered_with_what_to_install(missing: str) -> None:
    command = [sys.executable, "-c", BARE, missing]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"loadgen: {missing} is missing: pip install 'djinn[loadgen]'\n"
