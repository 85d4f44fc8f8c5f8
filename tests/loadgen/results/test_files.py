"""Results are written, read back by type, and refused when they are something else."""

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
from loadgen.results.files import Result, read_result, result_path, write_result
from loadgen.results.origin import published


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


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    assert read_result(write_result(SUMS, tmp_path / "a.json"), Sums) == SUMS


def test_every_result_says_where_it_comes_from(tmp_path: Path) -> None:
    found = json.loads(write_result(SUMS, tmp_path / "a.json").read_text())
    assert found["experiment"] == "sums"
    assert found["command"] == ["python", "-m", "loadgen", "sums"]
    assert found["seed"] == 3
    assert datetime.fromisoformat(found["started_at"]) == SUMS.started_at
    assert found["machine"]["cpus"] >= 1
    assert found["machine"]["memory_bytes"] > 2**20
    assert "djinn" in found["versions"]


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    report = Sums(seed=0, parts={"x": Part((math.nan, math.inf, -math.inf, 1.0))})
    text = write_result(report, tmp_path / "a.json").read_text()
    part = json.loads(text, parse_constant=lambda name: pytest.fail(name))["parts"]["x"]
    assert part == {"numbers": [None, None, None, 1.0], "limit": None}


def test_numbers_are_as_exact_as_a_clock(tmp_path: Path) -> None:
    report = Sums(seed=0, parts={"x": Part((123.4567891234, 1 / 3))})
    numbers = read_result(write_result(report, tmp_path / "a.json"), Sums).parts["x"].numbers
    assert numbers == pytest.approx((123.4567891234, 1 / 3), abs=1e-6)


def test_a_result_is_never_overwritten(tmp_path: Path) -> None:
    write_result(SUMS, tmp_path / "a.json")
    with pytest.raises(FileExistsError):
        write_result(SUMS, tmp_path / "a.json")


def test_files_are_named_after_their_start(tmp_path: Path) -> None:
    at = datetime.fromisoformat("2026-01-02T04:04:05.000006+01:00")
    assert result_path(tmp_path, "sums", at, "csv") == tmp_path / "sums-20260102T030405.000006Z.csv"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a result of sums"),
        ('{"experiment": "kv", "schema_version": 3}', "is not a result of sums, but of kv"),
        ('{"experiment": "sums", "schema_version": 1}', "has schema_version 1, but only 3"),
        ('{"experiment": "sums", "schema_version": 3}', "is old, and lacks seed: measure anew"),
        ('{"experiment": "sums", "schema_version": 3, "seed": "x"}', "is damaged at seed: Input should be a valid int"),
    ],
)
def test_what_is_no_such_result_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(LoadgenError) as refused:
        read_result(path, Sums)
    assert f"{path} {message}" in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadgenError, match=r"cannot read .*nowhere\.json: No such file"):
        read_result(tmp_path / "nowhere.json", Sums)


@pytest.mark.parametrize("arguments", [["--api-key", "djinn=sesame"], ["--api-key=djinn=sesame"]])
def test_keys_are_not_published(arguments: list[str]) -> None:
    shown = published(["density", *arguments, "--agents", "3"])
    assert "sesame" not in " ".join(shown)
    assert "djinn=***" in " ".join(shown)
    assert shown[:4] == ("python", "-m", "loadgen", "density")
    assert shown[-2:] == ("--agents", "3")


@pytest.mark.parametrize("arguments", [["--api-key", "sesame"], ["--api-key=sesame"]])
def test_a_key_without_a_name_is_not_published_either(arguments: list[str]) -> None:
    assert "sesame" not in " ".join(published(["density", *arguments]))
