"""The result of an experiment: what every one has in common, its charts and what failed in it, how its file is named,
written, and read back.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson
from pydantic import TypeAdapter, ValidationError

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.report.origin import Machine, Server, Texts, machine, versions
from loadgen.report.tables import Cell, Figure, Outcome, Row, Table

Kind = Literal["lines", "steps", "cdf", "bars", "stack", "areas"]


@dataclass(frozen=True, slots=True)
class Chart:
    """Columns `x` and `y` of the table of that title, in a colour for each value of column `by`, of the rows that have
    all values of `where`. `cdf` draws the shares of `x` alone; `bars` and `stack` have a group for each value of `x`.

    `levels` are horizontal lines with their names, `marks` thin vertical ones.
    """

    title: str
    caption: str
    kind: Kind
    table: str
    x: str
    y: str = ""
    by: str = ""
    where: Mapping[str, Cell] = field(default_factory=dict)
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)
    marks: Sequence[float] = ()

    @property
    def slug(self) -> str:
        """The title as a part of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def rows(self, tables: Sequence[Table]) -> list[Row]:
        """What is drawn; empty where there is nothing to see."""
        needed = (self.x,) if self.kind == "cdf" else (self.x, self.y)
        return [
            row
            for table in tables
            if table.title == self.table
            for row in table.rows
            if all(row.get(name) == value for name, value in self.where.items())
            and all(row.get(name) is not None for name in needed)
        ]


@dataclass(frozen=True, slots=True)
class Failure:
    """A part that could not be measured to its end. `kind` is the name of the error's class."""

    part: str
    kind: str
    message: str


class Findings(Protocol):
    """What was seen, which may have been ended early."""

    interrupted: bool


@contextmanager
def noting(part: str, failures: list[Failure]) -> Iterator[None]:
    """Write down an error of the block, and go on behind it."""
    try:
        yield
    except (DjinnError, LoadgenError, OSError) as error:
        failures.append(Failure(part, type(error).__name__, str(error)))


@contextmanager
def ending_early(findings: Findings) -> Iterator[None]:
    """Take a Ctrl-C for the end of the block: what was seen until then is a result."""
    try:
        yield
    except asyncio.CancelledError:
        findings.interrupted = True


def failure_table(failures: Sequence[Failure], *, interrupted: bool) -> Table:
    """What could not be measured, and how many times; without rows if all was."""
    found: list[Row] = [
        {"part": each.part, "error": each.kind, "message": each.message, "times": count}
        for each, count in Counter(failures).items()
    ]
    early = {"part": "the run", "error": "interrupted", "message": "what is shown is what was measured until then"}
    return Table("Not measured to the end", [*found, *([early] if interrupted else [])])


SCHEMA_VERSION = 4
DIALECT = "https://json-schema.org/draft/2020-12/schema"
DIGITS = 9
"""Significant digits of numbers: a microsecond within a quarter of an hour. All 17 would double the files."""
LEVELS = 4
"""Things have lines of their own down to this depth; what is deeper, such as a row of a table, is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run of an experiment.

    `lead` are the paragraphs that come first on its page, `notes` those that come last. `command` is the command line
    as `origin.published` gives it; it and `started_at`, when that command began, are set by the command. `inputs` are
    digests by name: two runs compare only if they have the same. `has_failed`: something failed that no figure tells.
    """

    experiment: str
    title: str
    lead: tuple[str, ...]
    plan: Mapping[str, Any]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...] = ()
    notes: tuple[str, ...] = ()
    servers: tuple[Server, ...] = ()
    texts: Texts | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    interrupted: bool = False
    has_failed: bool = False
    command: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    machine: Machine = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)

    @property
    def succeeded(self) -> bool:
        """Whether everything was measured, and no target is missed: decides the exit code."""
        missed = any(each.outcome is Outcome.MISSED for each in self.figures)
        return not (missed or self.failures or self.interrupted or self.has_failed)

    def rows(self, title: str) -> Sequence[Mapping[str, Any]]:
        """Those of the table of that title; none if there is no such one."""
        return [row for table in self.tables if table.title == title for row in table.rows]

    def figure(self, name: str, **by: str) -> Figure:
        """The first of that name that is of all of that. Raises LookupError if there is none."""
        for each in self.figures:
            if each.name == name and by.items() <= each.by.items():
                return each
        raise LookupError(f"no figure {name} of {by}")


_REPORT = TypeAdapter(Report)


def result_path(folder: Path, experiment: str, started_at: datetime, suffix: str) -> Path:
    """Where a result of an experiment goes: EXPERIMENT-TIME.SUFFIX, in UTC."""
    return folder / f"{experiment}-{started_at.astimezone(UTC):%Y%m%dT%H%M%S.%fZ}.{suffix}"


def write_report(report: Report, path: Path) -> Path:
    """Write `report` to a new JSON file; returns `path`. NaN and infinities become null. Raises OSError."""
    found = _rounded(_REPORT.dump_python(report, mode="json"))
    with path.open("x", encoding="utf-8") as file:
        file.write(_lay_out(found) + "\n")
    return path


def read_report(path: Path, experiment: str | None = None) -> Report:
    """Read back what `write_report` wrote, of any experiment unless one is named.

    Raises `LoadgenError` if the file cannot be read, or is not such a report; the text says why.
    """
    try:
        text = path.read_bytes()
        head = orjson.loads(text)
    except OSError as error:
        raise LoadgenError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise LoadgenError(f"{path} is not JSON: {error}") from error
    found = head.get("experiment") if isinstance(head, dict) else None
    if found is None or experiment not in (None, found):
        raise LoadgenError(
            f"{path} is not a result of {experiment or 'loadgen'}" + (f", but of {found}" if found else "")
        )
    if (version := head.get("schema_version")) != SCHEMA_VERSION:
        raise LoadgenError(f"{path} has schema_version {version}, but only {SCHEMA_VERSION} can be read")
    try:
        return _REPORT.validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise LoadgenError(f"{path} is damaged at {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error


def schema_text() -> str:
    """The published form of a result, as a JSON schema that knows no other version of it."""
    schema = _REPORT.json_schema(mode="serialization")
    schema["properties"]["schema_version"]["const"] = SCHEMA_VERSION
    return orjson.dumps({"$schema": DIALECT, **schema}, option=orjson.OPT_INDENT_2).decode() + "\n"


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
