"""`djinn top`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.cli import main
from client import Djinn, Session
from client.shell.rates import Look, rates_between
from client.shell.rates import look as look_at
from tests.client.shell.terminals import CTRL_C, djinn_in_terminal
from tests.serving import serve


@contextmanager
def paused_session(djinn: Djinn, name: str) -> Iterator[Session]:
    with djinn.sessions.create(metadata={"name": name}) as session:
        session.break_at(layer=1)
        session.generate(token_ids=[5, 6, 7], max_tokens=2)
        yield session


def test_it_shows_tiers_turns_and_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as url, Djinn(url) as djinn, paused_session(djinn, "planner") as session, djinn.sessions.create():
        assert main(["top", "--count", "2", "--url", url]) == 0
    first, second = capsys.readouterr().out.split("\n\ntiny-llama: ")
    assert first.startswith("tiny-llama: 2 sessions, KV policy signal\n")
    assert "turns: 0 running, 0 waiting, 1 paused; - tokens/s" in first
    assert "turns: 0 running, 0 waiting, 1 paused; 0.0 tokens/s" in second
    assert re.search(r"^device +0% +16.0 KiB +0 B +4.0 MiB  to host 0 B/s, from host 0 B/s", second, re.MULTILINE)
    assert re.search(r"^host +0% .* 16.0 MiB", second, re.MULTILINE)
    assert re.search(r"^disk +- ", second, re.MULTILINE)
    (row,) = (line.split() for line in second.splitlines() if line.startswith("ses_"))
    assert row[:3] == [session.id, "planner", "paused"]
    assert "0.0" in row


def test_the_terminal_is_as_it_was_after_ctrl_c(server_url: str) -> None:
    with (
        Djinn(server_url) as djinn,
        paused_session(djinn, "planner"),
        djinn_in_terminal("top", DJINN_URL=server_url) as terminal,
    ):
        terminal.expect(r"device .*━")
        terminal.expect("planner")
        terminal.expect(r"[0-9.]+ tokens/s")  # the second look
        terminal.type(CTRL_C)
        assert terminal.end() == 130
    assert terminal.raw.count("\x1b[?1049h") == terminal.raw.count("\x1b[?1049l") == 1
    assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l")
    assert "Traceback" not in terminal.text


def test_a_single_session_is_no_plural(capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as url, Djinn(url) as djinn, djinn.sessions.create():
        assert main(["top", "--count", "1", "--url", url]) == 0
    assert capsys.readouterr().out.startswith("tiny-llama: 1 session, KV policy signal\n")


def look(djinn: Djinn, at: float) -> Look:
    found = look_at(djinn)
    return Look(found.memory, found.busy, at, found.unix_s)


def test_rates_come_from_two_looks(server_url: str) -> None:
    with Djinn(server_url) as djinn, paused_session(djinn, "a") as session:
        before = look(djinn, 10.0)
        session.step()
        after = look(djinn, 12.0)
        rates = rates_between(before, after)
        grown = session.refresh().tokens - before.busy[session.id].tokens
        assert grown > 0
        assert rates.tokens[session.id] == grown / 2
        assert rates_between(after, before).tokens[session.id] == 0
        assert set(rates.moved_bytes) == {"out", "in", "to_disk", "from_disk"}
