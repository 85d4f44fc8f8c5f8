"""What is printed, for people and for programs; `jsonschema` judges the latter."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, ValidationError
from rich.console import Console

from app.doctor.examination import examine, judge
from app.doctor.facts import Facts
from app.doctor.findings import Status, error, ok, warning
from app.doctor.report import Report
from tests.doctor.machines import CPU_TORCH, FakeProbe, Kernel
from tests.doctor.reports import healthy_facts
from tests.doctor.schema import schema_text

PUBLISHED = Path(__file__).parents[2] / "docs/doctor.schema.json"
NUMACTL = "numactl --cpunodebind=1 --membind=1 djinn serve --device cuda:0"


def report(facts: Facts) -> Report:
    return Report.of("cuda:0", judge("auto", "cuda:0", facts), facts)


def printed(shown: Report, width: int = 60) -> list[str]:
    """Its lines in a terminal that is too narrow for them."""
    console = Console(file=StringIO(), width=width)
    shown.print(console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def test_the_published_schema_is_that_of_the_code() -> None:
    Draft202012Validator.check_schema(json.loads(PUBLISHED.read_text("utf-8")))
    assert PUBLISHED.read_text("utf-8") == schema_text()


def test_json_is_what_the_schema_says(kernel: Kernel) -> None:
    validator = Draft202012Validator(json.loads(PUBLISHED.read_text("utf-8")))
    on_cpu = examine("cpu", None, FakeProbe(torch=CPU_TORCH, driver=None), kernel.root)
    for made in (report(healthy_facts()), on_cpu):
        validator.validate(json.loads(made.to_json()))
    spoiled = json.loads(on_cpu.to_json())
    spoiled["findings"][0]["status"] = "fine"
    with pytest.raises(ValidationError):
        validator.validate(spoiled)


def test_each_finding_is_a_line_with_its_remedy_below_unbroken_and_is_in_the_json() -> None:
    unbound = report(replace(healthy_facts(), numa=replace(healthy_facts().numa, process_nodes=(0, 1))))
    lines, made = printed(unbound), json.loads(unbound.to_json())
    assert (made["schema_version"], made["device"], made["status"]) == (1, "cuda:0", "warning")
    assert next(finding["remedy"] for finding in made["findings"] if finding["name"] == "numa") == NUMACTL
    assert (made["facts"]["device"]["copies"]["to_device"]["median"], made["facts"]["numa"]["gpu_node"]) == (55e9, 1)
    position = next(number for number, line in enumerate(lines) if line.startswith("warning  numa"))
    assert lines[position].endswith("GPU on node 1, process on nodes 0, 1 of nodes 0, 1")
    assert lines[position + 1].endswith(f"-> {NUMACTL}")
    assert lines[0] == "ok       device              cuda:0: NVIDIA H100 80GB HBM3"
    assert lines[-1] == "cuda:0: 1 warning"
    assert printed(report(healthy_facts()))[-1] == "cuda:0: all is well"
    bad = [error("a", "", "do"), warning("b", "", "do"), warning("c", "", "do"), ok("d", "")]
    made = Report.of("cpu", bad, healthy_facts())
    assert (made.status, printed(made)[-1]) == (Status.ERROR, "cpu: 1 error, 2 warnings")
