"""A whole run against a real server with a tiny model: its files are what the schema says, and can be shown again."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from loadgen.cli import main
from loadgen.experiments.density.report import DensityReport
from loadgen.load.trace import read_trace, trace_sha256
from loadgen.results.files import read_result
from tests.serving import serve

AGENTS, TURNS = 3, 2
LOAD = f"""
    --agents {AGENTS} --turns {TURNS} --context 60 --resume-tokens 20 --completion-tokens 6 --system-tokens 16
    --rate 4 --think 1:2 --time-scale 0.05 --repeats 2 --api-key plain=sesame
""".split()
SCHEMA = Path(__file__).parents[4] / "docs/schemas/density.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run of two targets left."""
    folder = tmp_path_factory.mktemp("results")
    with serve() as url:
        targets = ["--target", f"djinn={url}", "--target", f"plain={url}#tiny-llama"]
        assert main(["density", *targets, *LOAD, "--output", str(folder)]) == 0
    return folder


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_the_result_is_what_the_schema_says(folder: Path) -> None:
    text = only(folder, "density-*.json").read_text("utf-8")
    Draft202012Validator(json.loads(SCHEMA.read_text("utf-8"))).validate(json.loads(text))
    assert "sesame" not in text


def test_the_result_says_how_it_came_about(folder: Path) -> None:
    found = read_result(only(folder, "density-*.json"), DensityReport)
    assert found.command[:4] == ("python", "-m", "loadgen", "density")
    assert "plain=***" in found.command
    assert found.trace_sha256 == trace_sha256(read_trace(only(folder, "trace-*.jsonl")))


def test_every_turn_has_its_line(folder: Path) -> None:
    with only(folder, "density-*.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * 2 * AGENTS * TURNS
    assert {line["error"] for line in lines} == {""}


def test_the_page_has_every_figure_as_a_picture_too(folder: Path) -> None:
    page = only(folder, "density-*.html").read_text("utf-8")
    assert page.count("<svg") == len(list(folder.glob("density-*.png"))) >= 5
    assert "sesame" not in page


def test_the_result_can_be_shown_again(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(only(folder, "density-*.json")), "--output", str(tmp_path)]) == 0
    assert f"{2 * AGENTS * TURNS} of {2 * AGENTS * TURNS}" in capsys.readouterr().out
