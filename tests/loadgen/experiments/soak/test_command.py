"""A short soak of real servers with a tiny model: small, and whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from loadgen.cli import main
from loadgen.experiments.soak.plan import SoakPlan
from loadgen.experiments.soak.report import SoakReport
from loadgen.results.files import read_result
from loadgen.results.schema import json_schema

pytestmark = pytest.mark.timeout(400)
SEED = 6
"""A full disk comes first, then a kill of the engine."""
MINUTES, EVERY = 0.2, 3.0


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve seconds of four agents, and faults in them."""
    folder = tmp_path_factory.mktemp("soak")
    size = ["--minutes", str(MINUTES), "--every", str(EVERY), "--agents", "4", "--seed", str(SEED)]
    assert main(["soak", *size, "--model", "random:tiny-llama", "--output", str(folder)]) == 0
    return folder


def result(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("soak-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.long
def test_no_token_is_wrong_and_faults_came(soaked: Path) -> None:
    found = result(soaked)["findings"]
    assert (found["wrong"], found["unexpected"], found["failures"]) == ([], [], [])
    names = [name for _, (_, name) in zip(found["faults"], SoakPlan(seed=SEED).faults(), strict=False)]
    assert [fault["name"] for fault in found["faults"]] == names
    assert names
    assert "clock steps" in found["skipped"]
    assert found["actions"]["chat"] > 0
    assert found["answers"] > found["actions"]["chat"]


@pytest.mark.long
def test_the_server_was_sampled(soaked: Path) -> None:
    samples = result(soaked)["findings"]["samples"]
    assert len(samples) >= 5
    assert all(sample["rss_bytes"] > 0 and sample["descriptors"] > 0 for sample in samples)
    assert any(sample["sessions"] for sample in samples)
    assert any(sample["state_bytes"] for sample in samples)


@pytest.mark.long
def test_the_result_is_what_the_schema_says_and_can_be_read_back(soaked: Path) -> None:
    (path,) = soaked.glob("soak-*.json")
    jsonschema.validate(result(soaked), json_schema(SoakReport))
    assert read_result(path, SoakReport).succeeded


@pytest.mark.long
def test_the_page_has_its_figures_and_tables(soaked: Path) -> None:
    (path,) = soaked.glob("soak-*.html")
    text = path.read_text()
    for heading in ("Targets", "Faults", "What agents did", "Resident memory"):
        assert heading in text
    assert text.count("<svg") == len(list(soaked.glob("soak-*.png"))) == 4


def test_what_cannot_start_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--minutes", "0", "--output", str(tmp_path)]) == 2
    assert "minutes must be a number above 0" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_start_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--minutes", "1", "--model", "random:nothing", "--output", str(tmp_path)]) == 2
    assert "no shape 'nothing'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
