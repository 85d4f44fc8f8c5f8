"""`djinn bench`: which experiments of the load generator it runs, and what it says where something is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app import bench
from app.cli import main
from docs.site.pages import ROOT
from loadgen.cli import make_parser


@pytest.mark.parametrize(
    ("flags", "quick", "rivals"),
    [((), True, None), (("--full",), False, None), (("--rivals", "llamacpp,ray"), True, "llamacpp,ray")],
)
def test_it_runs_the_comparisons_of_the_load_generator(
    flags: tuple[str, ...], quick: bool, rivals: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []

    class Ended(subprocess.Popen[bytes]):
        def __init__(self, command: list[str]) -> None:
            ran.append(command)
            super().__init__([sys.executable, "-c", "raise SystemExit(1)"])

    monkeypatch.setattr(bench.subprocess, "Popen", Ended)  # type: ignore[attr-defined]
    assert main(["bench", *flags, "--output", str(tmp_path)]) == 1
    (command,) = ran
    options = make_parser().parse_args(command[command.index("loadgen") + 1 :])
    assert (options.subcommand, options.only) == ("all", "density,capacity")
    assert (options.quick, options.rivals, options.output) == (quick, rivals, tmp_path)


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "lz4").mkdir()
    (tmp_path / "lz4/__init__.py").write_text("raise ModuleNotFoundError('no lz4', name='lz4')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "app", "bench"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "loadgen: lz4 is missing: pip install 'djinn[loadgen]'\n"
