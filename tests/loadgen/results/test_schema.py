"""The published schemas are those of the code, and results are what they say; `jsonschema` is the judge."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, ValidationError

from loadgen.cli import main
from loadgen.commands.schema import RESULTS
from loadgen.load.workload import Replay, Workload
from loadgen.results.files import write_result
from tests.loadgen.experiments.density.building import report

SCHEMAS = Path(__file__).parents[3] / "docs/schemas"


def published(experiment: str) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{experiment}.json").read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_every_experiment_has_a_published_schema() -> None:
    assert {path.stem for path in SCHEMAS.glob("*.json")} == set(RESULTS)


@pytest.mark.parametrize("experiment", sorted(RESULTS))
def test_what_is_published_is_what_the_command_prints(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", experiment]) == 0
    assert (SCHEMAS / f"{experiment}.json").read_text("utf-8") == capsys.readouterr().out


@pytest.mark.parametrize(
    "load",
    [
        Workload(agents=3, turns=2),
        Workload(agents=2, rate=math.inf),
        Replay(trace=Path("agents.jsonl")),
    ],
)
def test_a_result_is_what_the_schema_says(load: Workload | Replay, tmp_path: Path) -> None:
    made = report(load=load) if isinstance(load, Workload) else replace(report(), workload=load)
    written = json.loads(write_result(made, tmp_path / "a.json").read_text("utf-8"))
    published("density").validate(written)
    written["targets"][0]["runs"][0]["turns"][0]["latency_s"] = "long"
    with pytest.raises(ValidationError):
        published("density").validate(written)
