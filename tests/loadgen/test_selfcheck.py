"""The load generator against a server whose delays are known.

The bounds here are those of a machine on which other things run; `python -m loadgen selfcheck` holds the strict ones.
"""

from __future__ import annotations

import pytest

from loadgen.cli import main

SMALL = ("--agents", "10", "--tokens", "3")


@pytest.mark.long
def test_delays_are_seen_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    """They are so long that a figure which leaves one out, or begins at the wrong event, is off by more."""
    assert main(["selfcheck", *SMALL, "--ttft", "0.6", "--gap", "0.4", "--tolerance", "0.3"]) == 0
    output = capsys.readouterr().out
    assert "20 turns, 0 failures" in output
    assert "within 300 ms" in output


def test_what_is_off_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """No figure is exact to a nanosecond."""
    assert main(["selfcheck", *SMALL, "--ttft", "0.01", "--gap", "0.01", "--tolerance", "1e-9"]) == 1
    assert "NOT within" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "message"), [("--agents", "agents must be at least 1"), ("--gap", "gap must be above 0")]
)
def test_what_cannot_be_checked(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", option, "0"]) == 2
    assert message in capsys.readouterr().err
