"""SIGHUP: files are read again, or the server drains. It never ends one that loads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import httpx
import pytest
from httpx_sse import connect_sse

import app.main
from app.cli import main
from app.domain.errors import FieldOutOfRange
from app.web.hangups import Hangups
from tests.processes import serve_process


@pytest.fixture
def missed() -> Iterator[list[int]]:
    """Each SIGHUP that nobody else hears."""
    found: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGHUP, before)


def hang_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


def test_one_that_comes_too_early_is_kept(missed: list[int]) -> None:
    taken: list[str] = []
    with Hangups.heard() as hangups:
        hang_up()
        hang_up()
        hangups.hand_to(lambda: taken.append("taken"))
        assert taken == ["taken"]
        hang_up()
        assert taken == ["taken", "taken"]
        assert not hangups.were_ignored
    assert missed == []
    hang_up()
    assert missed == [signal.SIGHUP]


def test_a_process_that_was_told_to_ignore_them_knows(missed: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    with Hangups.heard() as hangups:
        assert hangups.were_ignored
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.usefixtures("engine_in_a_thread")
def test_a_server_that_loads_is_not_ended(
    missed: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> NoReturn:
        hang_up()
        raise FieldOutOfRange("the model is loaded")

    monkeypatch.setattr(app.main, "load_app", load)
    assert main(["serve", "--model", "random:tiny-llama", "--port", "0", "--state-dir", "none"]) == 2
    assert missed == []
    assert capsys.readouterr().err.endswith("djinn: the model is loaded\n")


def test_a_server_without_files_drains_and_is_in_no_hurry(tmp_path: Path) -> None:
    body = {"token_ids": [5, 6], "max_tokens": 1000, "ignore_eos": True, "stream": True}
    flags = ("--drain-timeout-s", "60")
    with serve_process(tmp_path / "state", *flags) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        session = http.post("/v1/sessions").json()["id"]
        with connect_sse(http, "POST", f"/v1/sessions/{session}/generate", json=body) as source:
            stream = source.iter_sse()
            next(stream)
            os.kill(server.pid, signal.SIGHUP)
            while http.get("/ready").status_code == 200:
                pass
            os.kill(server.pid, signal.SIGHUP)
            *_, last = stream
        assert last.json()["finish_reason"] == "length"
        assert server.exit_status(30) == 0
