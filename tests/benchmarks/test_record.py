"""The files of a run, and those that are kept."""

import re
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks.record import RESULTS, write_results


@dataclass
class Run:
    values: list[float]


def test_a_run_becomes_json_and_markdown_of_one_name(tmp_path: Path) -> None:
    path = write_results(tmp_path / "new", "some-cpu", Run([1.5]), "# Title\n")
    assert path.read_text() == "# Title\n"
    assert orjson.loads(path.with_suffix(".json").read_bytes()) == {"values": [1.5]}


def test_the_index_links_to_every_result_and_to_nothing_that_is_gone() -> None:
    linked = set(re.findall(r"\]\(([^)]+)\)", (RESULTS / "README.md").read_text("utf-8")))
    assert {name for name in linked if not (RESULTS / name).is_file()} == set()
    assert {path.name for path in RESULTS.iterdir()} - {"README.md"} <= linked
