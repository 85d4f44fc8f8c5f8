"""The load generator against a server whose delays are known.

The bounds here are those of a machine on which other things run; `python -m loadgen selfcheck` holds the strict ones.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from loadgen.cli import main
from loadgen.load.records import Run
from loadgen.selfcheck import command as selfcheck
from loadgen.selfcheck.checking import Check

SMALL = ("--agents", "10", "--tokens", "3", "--ttft", "1", "--gap", "0.6")
"""Delays so long that a figure which leaves one out, or begins at the wrong event, is off by more than the bound."""


def test_delays_are_seen_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", *SMALL, "--tolerance", "0.5"]) == 0
    output = capsys.readouterr().out
    assert "20 turns, 0 failures" in output
    assert "within 500 ms" in output


def test_what_is_off_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """No figure is exact to a nanosecond."""
    assert main(["selfcheck", *SMALL, "--tolerance", "1e-9"]) == 1
    assert "NOT within" in capsys.readouterr().out


def test_an_interrupted_check_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(*_arguments: object) -> tuple[Run, tuple[Check, ...]]:
        return Run(1.0, interrupted=True), ()

    monkeypatch.setattr(selfcheck, "check", check)
    monkeypatch.setattr(selfcheck, "serving", lambda _delays: nullcontext("http://nowhere"))
    assert main(["selfcheck", *SMALL]) == 130


@pytest.mark.parametrize(
    ("option", "message"), [("--agents", "agents must be at least 1"), ("--gap", "gap must be above 0")]
)
def test_what_cannot_be_checked(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", *SMALL, option, "0"]) == 2
    assert message in capsys.readouterr().err
