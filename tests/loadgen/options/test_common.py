"""What every command ends with: figures, files, and an exit code."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from loadgen import cli
from loadgen.options.common import finish, with_origin
from loadgen.results.files import Result
from loadgen.results.inputs import Server
from loadgen.results.per_target import PerTarget

SERVER = Server("a", "http://127.0.0.1:1", "djinn", None)


@dataclass
class Seen:
    interrupted: bool


@dataclass(frozen=True)
class One:
    """What was seen of a target, and whether it was as it should be."""

    findings: Seen
    succeeded: bool
    server: Server = SERVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums(PerTarget, Result):
    experiment: Literal["sums"] = "sums"
    targets: tuple[One, ...]


GOOD, BAD, ENDED = One(Seen(False), True), One(Seen(False), False), One(Seen(True), False)


@pytest.mark.parametrize(
    ("targets", "code"), [((), 0), ((GOOD, GOOD), 0), ((GOOD, BAD), 1), ((BAD, ENDED), 130), ((ENDED, GOOD), 130)]
)
def test_the_exit_code_is_that_of_the_worst_target(targets: tuple[One, ...], code: int) -> None:
    assert finish(Sums(seed=0, targets=targets), "figures", list) == code


def test_figures_and_files_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    finish(Sums(seed=0, targets=()), "figures", lambda: [Path("a [1].json"), Path("b.html")])
    machine, *shown = capsys.readouterr().out.splitlines()
    assert machine == f"on {Sums(seed=0, targets=()).machine}"
    assert shown == ["figures", "results: a [1].json", "results: b.html"]


def test_figures_are_shown_also_where_no_file_can_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> Sequence[Path]:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        finish(Sums(seed=0, targets=()), "figures", write)
    assert "figures" in capsys.readouterr().out


class Recording:
    """A command that makes a report at its end."""

    def __init__(self) -> None:
        self.ran_at: datetime | None = None
        self.report: Sums | None = None

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--api-key")

    def run(self, options: argparse.Namespace, _progress: Console) -> int:
        self.ran_at = datetime.now(UTC)
        self.report = with_origin(Sums(seed=0, targets=()), options)
        return 0


def test_a_report_tells_when_its_command_began_and_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Recording()
    monkeypatch.setitem(cli.COMMANDS, "kv", (command, ""))
    cli.main(["kv", "--api-key", "a=sesame"])
    assert command.report is not None
    assert command.ran_at is not None
    assert command.report.started_at <= command.ran_at
    assert command.report.command == ("python", "-m", "loadgen", "kv", "--api-key", "a=***")
