"""Result files: what all have in common, how they are named, written, and read back."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError

from loadgen.errors import LoadgenError
from loadgen.results.origin import Machine, machine, versions

SCHEMA_VERSION = 3

DIGITS = 9
"""Significant digits of numbers: a microsecond within a quarter of an hour. All 17 would double the files."""

LEVELS = 6
"""Things have lines of their own down to this depth; what is deeper, such as a turn of a run, is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(ABC):
    """What every result says of its origin; an experiment's report is a dataclass that extends this one.

    Such a class sets `experiment` to its own name. `command` is the command line as `origin.published` gives it;
    it and `started_at`, when that command began, are set by the command (`commands.common.with_origin`).
    """

    experiment: str
    seed: int
    command: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    machine: Machine = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=versions)

    @property
    @abstractmethod
    def interrupted(self) -> bool:
        """Whether the user ended it early."""

    @property
    @abstractmethod
    def succeeded(self) -> bool:
        """Whether everything was measured, and all was as it should be: decides the exit code."""


R = TypeVar("R", bound=Result)


def result_path(folder: Path, experiment: str, started_at: datetime, suffix: str) -> Path:
    """Where a result of an experiment goes: EXPERIMENT-TIME.SUFFIX, in UTC."""
    return folder / f"{experiment}-{started_at.astimezone(UTC):%Y%m%dT%H%M%S.%fZ}.{suffix}"


def write_result(report: Result, path: Path) -> Path:
    """Write `report` to a new JSON file; returns `path`. NaN and infinities become null. Raises OSError."""
    found = _rounded(TypeAdapter(type(report)).dump_python(report, mode="json"))
    with path.open("x", encoding="utf-8") as file:
        file.write(_lay_out(found) + "\n")
    return path


def read_result(path: Path, kind: type[R]) -> R:
    """Read back what `write_result` wrote of a report of that class.

    Raises `LoadgenError` if the file cannot be read, or is not such a report; the text says why.
    """
    try:
        text = path.read_bytes()
        head = orjson.loads(text)
    except OSError as error:
        raise LoadgenError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise LoadgenError(f"{path} is not JSON: {error}") from error
    _check_head(path, head, kind)
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        if problem["type"] == "missing":
            raise LoadgenError(f"{path} is old, and lacks {place}: measure again") from error
        raise LoadgenError(f"{path} is damaged at {place}: {problem['msg']}") from error


def _check_head(path: Path, head: object, kind: type[Result]) -> None:
    """Raise `LoadgenError` unless the JSON says that it is a report of that class, of this version."""
    wanted = kind.__dataclass_fields__["experiment"].default
    found = head.get("experiment") if isinstance(head, dict) else None
    if found != wanted:
        raise LoadgenError(f"{path} is not a result of {wanted}" + (f", but of {found}" if found else ""))
    version = head.get("schema_version") if isinstance(head, dict) else None
    if version != SCHEMA_VERSION:
        raise LoadgenError(f"{path} has schema_version {version}, but only {SCHEMA_VERSION} can be read")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def _lay_out(value: Any, level: int = 0) -> str:
    if level == LEVELS or not value or not isinstance(value, dict | list):
        return orjson.dumps(value).decode()
    if isinstance(value, dict):
        parts = [f"{orjson.dumps(key).decode()}: {_lay_out(one, level + 1)}" for key, one in value.items()]
    else:
        parts = [_lay_out(one, level + 1) for one in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    margin = "\n" + level * " "
    return f"{begin}{margin} {f',{margin} '.join(parts)}{margin}{end}"
