"""The documentation knows every option and every figure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.experiments.density.tables import LATENCIES
from loadgen.targets.subject import HISTOGRAMS

EXPERIMENTS = (
    *("all", "capacity", "cluster", "density", "kv", "migrate", "oversubscribe", "resume-latency", "selfcheck"),
    *("simulate", "soak", "weights", "whitebox"),
)
TEXT = (Path(__file__).parents[2] / "docs/loadgen.md").read_text("utf-8")


def test_every_option_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    for experiment in EXPERIMENTS:
        with pytest.raises(SystemExit):
            main([experiment, "--help"])
    with pytest.raises(SystemExit):
        main(["peers", "start", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}
    assert options == set(re.findall(r"--[a-z][a-z-]*", TEXT))


def test_every_figure_is_documented() -> None:
    assert all(label.partition(" of ")[0] in TEXT for label in LATENCIES)


def test_every_histogram_is_documented() -> None:
    assert set(HISTOGRAMS) == set(re.findall(r"djinn_\w+_seconds", TEXT))
