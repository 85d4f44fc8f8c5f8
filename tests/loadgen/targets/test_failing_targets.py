"""Whatever a server does to the load, the run ends, and its report says by kind what went wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from loadgen.cli import main
from loadgen.selfcheck.stub import READY_LINE
from tests.loadgen.stubs import openai_app, serving

AGENTS, TURNS, TOKENS = 2, 2, 4
LOAD = f"""
    --agents {AGENTS} --turns {TURNS} --context 40 --resume-tokens 8 --completion-tokens {TOKENS} --system-tokens 8
    --rate inf --think 0:0 --turn-timeout 0.5
""".split()
EVENT = b'data: {"choices": [{"text": "a", "token_ids": [97]}]}\n\n'

Complete = Callable[[Request], Awaitable[Response]]


def density(output: Path, url: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the report."""
    code = main(["density", *LOAD, "--output", str(output), "--target", f"ill={url}#stub", *arguments])
    (path,) = output.glob("density-*.json")
    return code, json.loads(path.read_text())


def streaming(*parts: bytes, then: Callable[[], Awaitable[None]] | None = None) -> Complete:
    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        if then is not None:
            await then()

    async def complete(_request: Request) -> Response:
        return StreamingResponse(body(), media_type="text/event-stream")

    return complete


def with_status(status: int) -> Complete:
    async def complete(_request: Request) -> Response:
        return JSONResponse({"error": {"message": "not now", "type": "t", "code": None, "param": None}}, status)

    return complete


async def never() -> None:
    await asyncio.sleep(3600)


async def dribble(_request: Request) -> Response:
    """Never silent for long, and never done."""

    async def body() -> AsyncIterator[bytes]:
        while True:
            yield EVENT
            await asyncio.sleep(0.1)

    return StreamingResponse(body(), media_type="text/event-stream")


async def break_off() -> None:
    raise ConnectionAbortedError


@pytest.mark.parametrize(
    ("complete", "kind"),
    [
        (streaming(EVENT, then=never), "Timeout"),
        (dribble, "Timeout"),
        (with_status(500), "ServerError"),
        (with_status(429), "RateLimited"),
        (streaming(EVENT, b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'), "APIError"),
        (streaming(EVENT, b"data: {malformed\n\n"), "InvalidAnswer"),
        (streaming(EVENT, then=break_off), "StreamBroken"),
        (streaming(EVENT, b"data: [DONE]\n\n"), "InvalidAnswer"),
    ],
    ids=["stall", "dribble", "500", "429", "error", "malformed", "break-off", "no-usage"],
)
def test_every_turn_fails_by_its_kind(
    complete: Complete, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    with serving(openai_app(complete)) as url:
        code, found = density(tmp_path, url)
    assert code == 1
    summary = found["targets"][0]["summary"]
    assert summary["turn_errors"] == {kind: AGENTS}
    assert summary["other_errors"] == {kind: 1}  # the turn before the clock starts
    assert (summary["turns_completed"], summary["turns_not_run"]) == (0, AGENTS * (TURNS - 1))
    assert kind in capsys.readouterr().out
    assert time.monotonic() - started < 20


def kill_under_way(url: str, pid: int) -> None:
    """`kill -9` once turns have begun and others have ended, or in any case after half a minute."""
    deadline = time.monotonic() + 30
    while len(httpx.get(f"{url}/done").json()["first_s"]) < 15 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_a_server_that_is_killed_under_the_load(tmp_path: Path) -> None:
    """The turns that run break off; those that come later find nobody."""
    command = [sys.executable, "-m", "loadgen.selfcheck.stub", "--ttft", "0.05", "--gap", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().removeprefix(READY_LINE).strip()}"
        killer = threading.Thread(target=kill_under_way, args=(url, server.pid))
        killer.start()
        arrivals = ["--agents", "40", "--arrivals", "constant", "--rate", "8", "--turn-timeout", "5"]
        code, found = density(tmp_path, url, *arrivals, "--completion-tokens", "50")
        killer.join()
    assert code == 1
    summary = found["targets"][0]["summary"]
    assert summary["turns_completed"] > 0
    assert set(summary["turn_errors"]) <= {"StreamBroken", "ConnectionLost", "ConnectionFailed"}
    assert summary["turn_errors"]["ConnectionFailed"] > 0
    assert summary["turns_planned"] == summary["turns_completed"] + summary["turns_failed"] + summary["turns_not_run"]


def test_one_ill_server_costs_nothing_of_what_is_measured_of_the_others(tmp_path: Path) -> None:
    done = b'data: {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 4}}\n\ndata: [DONE]\n\n'
    answers = streaming(*(TOKENS * [EVENT]), done)
    with serving(openai_app(answers)) as well, serving(openai_app(with_status(500))) as ill:
        code, found = density(tmp_path, ill, "--target", f"well={well}#stub")
    assert code == 1
    assert [target["server"]["name"] for target in found["targets"]] == ["ill", "well"]
    assert [target["summary"]["turns_completed"] for target in found["targets"]] == [0, AGENTS * TURNS]
