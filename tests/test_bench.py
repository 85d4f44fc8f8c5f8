"""`djinn bench`: which experiments of the load generator it runs, and what it says where something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site.pages import ROOT
from loadgen.cli import make_parser

STAND_IN = """
import json, os, sys
json.dump(sys.argv, open(os.environ["CALLED"], "w"))
sys.exit(1)
"""
"""In place of the load generator, whose experiments take minutes."""


def run(folder: Path, module: str, code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """`djinn bench` where `module` is another one."""
    (folder / module).mkdir()
    for name in ("__init__.py", "__main__.py"):
        (folder / module / name).write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "CALLED": str(folder / "called")}
    command = [sys.executable, "-m", "app", "bench", *flags]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("flags", "quick", "rivals"),
    [((), True, None), (("--full", "--rivals", "llamacpp,ray"), False, "llamacpp,ray")],
)
def test_it_runs_the_comparisons_of_the_load_generator(
    flags: tuple[str, ...], quick: bool, rivals: str | None, tmp_path: Path
) -> None:
    assert run(tmp_path, "loadgen", STAND_IN, *flags, "--output", str(tmp_path)).returncode == 1
    _, *arguments = json.loads((tmp_path / "called").read_text())
    options = make_parser().parse_args(arguments)
    assert (options.subcommand, options.only) == ("all", "density,capacity")
    assert (options.quick, options.rivals, options.output) == (quick, rivals, tmp_path)


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    done = run(tmp_path, "lz4", "raise ModuleNotFoundError('no lz4', name='lz4')")
    assert done.returncode == 2
    assert done.stderr == "loadgen: lz4 is missing: pip install 'djinn-server[loadgen]'\n"
