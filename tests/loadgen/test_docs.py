"""The documentation knows every option and every figure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.site.loadgen_page import loadgen_page
from loadgen.cli import COMMANDS, main
from loadgen.experiments.density.tables import LATENCIES
from loadgen.targets.subject import HISTOGRAMS

TEXT = (Path(__file__).parents[2] / "docs/reference/experiments.md").read_text("utf-8")
FLAG = r"--[a-z][a-z-]*"


def test_the_page_has_every_option_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = loadgen_page()
    for command in [[name] for name in COMMANDS] + [["peers", "start"]]:
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        [section] = re.findall(rf"^## `{command[0]}`$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        assert set(re.findall(rf"^  ({FLAG})", capsys.readouterr().out, re.MULTILINE)) <= set(
            re.findall(rf"`({FLAG})`", section)
        )


def test_every_command_is_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs/loadgen.md").read_text("utf-8")
    assert {name for name in COMMANDS if f" -m loadgen {name}" not in guide} == set()


def test_every_figure_is_documented() -> None:
    assert all(label.partition(" of ")[0] in TEXT for label in LATENCIES)


def test_every_histogram_is_documented() -> None:
    assert set(HISTOGRAMS) == set(re.findall(r"djinn_\w+_seconds", TEXT))
