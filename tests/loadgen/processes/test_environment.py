"""What other servers' environments have in common with this one."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from loadgen.processes.environment import versions_here


def test_constraints_are_of_this_environment_and_pip_takes_them(tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text(versions_here())
    lines = versions_here().splitlines()
    assert f"torch=={Version(version('torch')).public}" in lines
    assert not any("+" in line for line in lines)
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--constraint", "constraints.txt", "packaging"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
