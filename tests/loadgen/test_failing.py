"""Whatever a server does to the load: a run ends, and says what it measured and what failed."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from loadgen.cli import main
from loadgen.experiments.density.rows import TURNS as TURN_ROWS
from loadgen.report.report import Report, read_report
from tests.loadgen.experiments.conftest import value
from tests.loadgen.stubs import openai_app, serving

AGENTS, TURNS, TOKENS = 2, 2, 4
LOAD = f"""
    --agents {AGENTS} --turns {TURNS} --context 40 --resume-tokens 8 --completion-tokens {TOKENS} --system-tokens 8
    --rate inf --think 0:0 --turn-timeout 60
""".split()
EVENT = b'data: {"choices": [{"text": "a", "token_ids": [97]}]}\n\n'
DONE = b'data: {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 4}}\n\ndata: [DONE]\n\n'

Complete = Callable[[Request], Awaitable[Response]]


def density(output: Path, url: str, *arguments: str) -> tuple[int, Report]:
    """The exit code, and the report."""
    code = main(["density", *LOAD, "--output", str(output), "--target", f"ill={url}#stub", *arguments])
    (path,) = output.glob("density-*.json")
    return code, read_report(path)


def errors(found: Report) -> Counter[str]:
    """Turns that failed, by the kind of the error."""
    return Counter(row["error"] for row in found.rows(TURN_ROWS) if row.get("error"))


def streaming(*parts: bytes, gap_s: float = 0.0, then: Callable[[], Awaitable[None]] | None = None) -> Complete:
    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
            await asyncio.sleep(gap_s)
        if then is not None:
            await then()

    async def complete(_request: Request) -> Response:
        return StreamingResponse(body(), media_type="text/event-stream")

    return complete


def with_status(status: int) -> Complete:
    async def complete(_request: Request) -> Response:
        return JSONResponse({"error": {"message": "not now", "type": "t", "code": None, "param": None}}, status)

    return complete


WELL = streaming(*(TOKENS * [EVENT]), DONE)


async def never() -> None:
    await asyncio.sleep(3600)


async def break_off() -> None:
    raise ConnectionAbortedError


@pytest.mark.parametrize(
    ("complete", "kind"),
    [
        (streaming(EVENT, then=never), "Timeout"),
        (streaming(*(100 * [EVENT]), gap_s=0.1), "Timeout"),
        (with_status(500), "ServerError"),
        (with_status(429), "RateLimited"),
        (streaming(EVENT, b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'), "APIError"),
        (streaming(EVENT, b"data: {malformed\n\n"), "InvalidAnswer"),
        (streaming(EVENT, then=break_off), "StreamBroken"),
        (streaming(EVENT, b"data: [DONE]\n\n"), "InvalidAnswer"),
        (streaming(EVENT, DONE.replace(b": 4}", b": 3}")), "WrongTokenCount"),
        (streaming(DONE), "WrongTokenCount"),
    ],
    ids=["stall", "dribble", "500", "429", "error", "malformed", "break-off", "no-usage", "too-few", "silent"],
)
def test_every_turn_fails_by_its_kind(
    complete: Complete, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(openai_app(complete)) as url:
        code, found = density(tmp_path, url, *["--turn-timeout", "0.5"] * (kind == "Timeout"))
    assert code == 1
    assert errors(found) == {kind: AGENTS}
    # The turn before the clock starts is no figure: nobody counts its tokens.
    assert value(found, "errors between turns", target="ill") == (0 if kind == "WrongTokenCount" else 1)
    assert value(found, "turns completed", target="ill") == 0
    assert kind in capsys.readouterr().out


def test_a_server_that_goes_away_under_the_load(tmp_path: Path) -> None:
    """Running turns break off. Later ones find no server."""
    requests, crowded = iter(range(1000)), threading.Event()

    async def complete(request: Request) -> Response:
        if next(requests) < 8:
            return await WELL(request)
        crowded.set()
        return await streaming(EVENT, then=never)(request)

    with ExitStack() as stack:
        url = stack.enter_context(serving(openai_app(complete)))
        closing = threading.Thread(target=lambda: stack.close() if crowded.wait(30) else None)
        closing.start()
        arrivals = ["--agents", "30", "--arrivals", "constant", "--rate", "20"]
        code, found = density(tmp_path, url, *arrivals)
        closing.join()
    assert code == 1
    assert value(found, "turns completed", target="ill") > 0
    assert set(errors(found)) <= {"StreamBroken", "ConnectionLost", "ConnectionFailed"}
    assert errors(found)["ConnectionFailed"] > 0


def test_one_ill_server_costs_nothing_of_what_is_measured_of_the_others(tmp_path: Path) -> None:
    with serving(openai_app(WELL)) as well, serving(openai_app(with_status(500))) as ill:
        code, found = density(tmp_path, ill, "--target", f"well={well}#stub")
    assert code == 1
    assert [server.name for server in found.servers] == ["ill", "well"]
    assert [value(found, "turns completed", target=name) for name in ("ill", "well")] == [0, AGENTS * TURNS]


TERMINATED = """
import time
from loadgen.options.common import sigterm_as_interrupt
with sigterm_as_interrupt():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        pass
print("interrupted", flush=True)
time.sleep(60)
"""


def ignore_interrupts() -> None:
    """As a shell has it for what it runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_sigterm_interrupts_a_run_in_the_background_and_ends_what_comes_behind_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TERMINATED], stdout=subprocess.PIPE, text=True, preexec_fn=ignore_interrupts
    ) as process:
        assert process.stdout is not None
        for line in ("ready\n", "interrupted\n"):
            assert process.stdout.readline() == line
            process.terminate()
        assert process.wait(30) == -signal.SIGTERM
