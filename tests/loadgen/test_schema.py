"""The published schemas are those of the code; `jsonschema` is the judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from loadgen.cli import main
from loadgen.commands.schema import RESULTS

SCHEMAS = Path(__file__).parents[2] / "docs/schemas"


def test_every_experiment_has_a_published_schema() -> None:
    assert {path.stem for path in SCHEMAS.glob("*.json")} == set(RESULTS)


@pytest.mark.parametrize("experiment", sorted(RESULTS))
def test_what_is_published_is_what_the_command_prints(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", experiment]) == 0
    published = (SCHEMAS / f"{experiment}.json").read_text("utf-8")
    assert published == capsys.readouterr().out
    Draft202012Validator.check_schema(json.loads(published))
