"""Results: files that are read back, tables, units, and what failed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import pytest

from loadgen.errors import LoadgenError
from loadgen.load.think import InfinityAsNull
from loadgen.results.failures import Failure, failure_table, noting
from loadgen.results.files import Result, read_result, write_result
from loadgen.results.origin import published
from loadgen.results.text import in_bytes, in_seconds, in_speed


@dataclass(frozen=True, slots=True)
class Part:
    numbers: tuple[float, ...]
    limit: InfinityAsNull = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums(Result):
    experiment: Literal["sums"] = "sums"
    parts: dict[str, Part]

    @property
    def interrupted(self) -> bool:
        return False

    @property
    def succeeded(self) -> bool:
        return True


SUMS = Sums(
    seed=3, command=("python", "-m", "loadgen", "sums"), parts={"a [1,\n 2]": Part((1.5, 2.0)), "b": Part((), 7.0)}
)


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    report = Sums(seed=0, parts={"x": Part((math.nan, math.inf, -math.inf, 1.0))})
    text = write_result(report, tmp_path / "a.json").read_text()
    part = json.loads(text, parse_constant=lambda name: pytest.fail(name))["parts"]["x"]
    assert part == {"numbers": [None, None, None, 1.0], "limit": None}


def test_a_result_is_never_overwritten(tmp_path: Path) -> None:
    write_result(SUMS, tmp_path / "a.json")
    with pytest.raises(FileExistsError):
        write_result(SUMS, tmp_path / "a.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a result of sums"),
        ('{"experiment": "kv", "schema_version": 3}', "is not a result of sums, but of kv"),
        ('{"experiment": "sums", "schema_version": 1}', "has schema_version 1, but only 3"),
        ('{"experiment": "sums", "schema_version": 3}', "is old, and lacks seed: measure again"),
        ('{"experiment": "sums", "schema_version": 3, "seed": "x"}', "is damaged at seed: Input should be a valid int"),
    ],
)
def test_what_is_no_such_result_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(LoadgenError) as refused:
        read_result(path, Sums)
    assert f"{path} {message}" in str(refused.value)


def test_what_is_written_is_read_back_and_says_where_it_comes_from(tmp_path: Path) -> None:
    path = write_result(SUMS, tmp_path / "a.json")
    assert read_result(path, Sums) == SUMS
    found = json.loads(path.read_text())
    assert (found["experiment"], found["seed"]) == ("sums", 3)
    assert found["command"] == ["python", "-m", "loadgen", "sums"]
    assert datetime.fromisoformat(found["started_at"]) == SUMS.started_at
    assert found["machine"]["cpus"] >= 1
    assert "djinn-server" in found["versions"]


@pytest.mark.parametrize("arguments", [["--api-key", "djinn=sesame"], ["--api-key=djinn=sesame"], ["--api-key=sesame"]])
def test_keys_are_not_published(arguments: list[str]) -> None:
    shown = published(["density", *arguments, "--agents", "3"])
    assert "sesame" not in " ".join(shown)
    assert shown[:4] == ("python", "-m", "loadgen", "density")
    assert shown[-2:] == ("--agents", "3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (in_bytes(1023), "1,023 B"),
        (in_bytes(46080), "45.0 KiB"),
        (in_bytes(3 << 30), "3.00 GiB"),
        (in_bytes(2**51), "2,048 TiB"),
        (in_seconds(1.5e-7), "0.15 µs"),
        (in_seconds(0.999), "999 ms"),
        (in_seconds(3600), "3,600 s"),
        (in_speed(1.25e8), "125 MB/s"),
        (in_speed(4.5e11), "450 GB/s"),
    ],
)
def test_sizes_times_and_speeds_have_their_unit(text: str, expected: str) -> None:
    assert text == expected


def test_failures_that_are_alike_share_a_row() -> None:
    often, once = Failure("8 sessions", "Timeout", "too late"), Failure("1 session", "Timeout", "too late")
    table = failure_table([often, once, often], interrupted=True)
    assert [(row[0], row[-1]) for row in table.rows] == [("8 sessions", "2"), ("1 session", "1"), ("the run", "1")]
    assert {len(row) for row in table.rows} == {len(table.header)}


def fail(error: Exception) -> None:
    raise error


def test_an_error_of_a_part_is_noted_and_a_bug_is_not() -> None:
    failures: list[Failure] = []
    with noting("links", failures):
        fail(LoadgenError("none"))
    with pytest.raises(ZeroDivisionError), noting("links", failures):
        fail(ZeroDivisionError())
    assert failures == [Failure("links", "LoadgenError", "none")]
