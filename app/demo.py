"""`djinn demo` and `djinn bench`: agents that arrive, think and come back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from app.flags import READY, child_command

if TYPE_CHECKING:
    from client import AsyncDjinn

SERVER = ("serve", "--state-dir", "none", "--kv-device", "6x800", "--kv-host", "24x800")
"""The device holds half of the agents."""
ENDING_S = 15.0
"""How long a process may take to end before it is killed."""
AGENTS = {
    "planner": "plans the release of a web shop",
    "code-review": "reads changes to a payment service",
    "test-runner": "runs the tests of a compiler",
    "docs-writer": "writes the manual of a database",
    "researcher": "compares batteries for electric ships",
    "triage": "sorts the reports of users by how much they hurt",
    "deploy": "rolls a service out, region by region",
    "sql-agent": "answers questions about sales",
    "browser": "books a train to Rome",
    "release-notes": "tells users what has changed",
    "security": "looks for secrets in logs",
    "translator": "translates a menu into six languages",
}
"""Names, and what each does."""
TOOLS = ("pytest", "grep", "web_search", "psql", "git_diff", "read_file")
FIRST_S, TOOL_S, TURNS = 1.0, (5.0, 12.0), 5
"""Seconds between arrivals; how long a tool takes, from and to; turns until an agent goes back to its notes."""
NOTES, TOKENS = 400, 40
"""Tokens of an agent's first prompt, and that it writes in a turn."""
PAUSE_AFTER_S = 20.0
RIDDLE = "The Eiffel Tower stands in the city of"


def demo(model: str, *, port: int, opens: bool) -> int:
    """Serve `model` on the port, 0 for a free one, and let agents come until Ctrl-C. `opens`: show the page in the
    browser. Returns the exit status: the server's, 1 if an agent failed.
    """
    with _as_interrupt(), _running(*SERVER, "--port", str(port), "--model", model) as server:
        assert server.stdout is not None
        found = next(filter(None, map(READY.match, server.stdout)), None)
        if found is None:  # it has said why
            return server.wait()
        print(f"Djinn is at {found[1]}: watch a dozen agents there. Ctrl-C ends them and the server.", flush=True)
        if opens:
            webbrowser.open(found[1])
        asyncio.run(_let_loose(found[1]))
        return server.poll() or 1


async def _let_loose(url: str) -> None:
    """A dozen agents, and one turn that stands between two layers, until the server has gone."""
    from client import AsyncDjinn, DjinnError  # imports httpx and NumPy, for which other commands need not wait

    async with AsyncDjinn(url, timeout=None) as djinn:
        try:
            async with asyncio.TaskGroup() as lives:
                for at, name in enumerate(AGENTS):
                    lives.create_task(_live(djinn, name, at * FIRST_S))
                lives.create_task(_pause(djinn, url))
        except* DjinnError as errors:
            print(f"djinn: an agent failed: {errors.exceptions[0]}", file=sys.stderr)


async def _live(djinn: AsyncDjinn, name: str, arrives_s: float) -> None:
    """One agent: it writes, waits for a tool, says when it will be back, and comes back."""
    chance = random.Random(name)
    await asyncio.sleep(arrives_s)
    session = await djinn.sessions.create(metadata={"name": name, "task": AGENTS[name]})
    notes = f"An agent {AGENTS[name]}. These are its notes.\n" + "It reads, it asks a tool, it writes. " * 40
    said = (await djinn.tokenize(notes))[:NOTES]
    for turn in itertools.count(1):
        await session.generate(token_ids=said, max_tokens=TOKENS, ignore_eos=True)
        tool, seconds = chance.choice(TOOLS), chance.uniform(*TOOL_S)
        await session.label({"tool": tool})
        await session.set_phase("io_wait", resume_in_ms=1000 * seconds)
        await asyncio.sleep(seconds)
        if turn % TURNS == 0:  # the same session: somebody may read it
            await session.rewind(NOTES)
        answer = f"\nThe tool {tool} has found three lines after {seconds:.0f} s. The next note:\n"
        said = await djinn.tokenize(answer, add_special_tokens=False)


async def _pause(djinn: AsyncDjinn, url: str) -> None:
    """A turn that stops where the model is about to know the answer, and a link to what can be seen there."""
    await asyncio.sleep(PAUSE_AFTER_S)
    model, *_ = await djinn.models()
    session = await djinn.sessions.create(metadata={"name": "inside the model", "task": "stands between two layers"})
    await session.capture_at(layers=range(model.layers))
    await session.break_at(layer=model.layers * 9 // 10, timeout_s=3600)
    print(f'"{RIDDLE}" is paused inside the model: {url}/#/sessions/{session.id}/model', flush=True)
    await session.generate(prompt=RIDDLE, max_tokens=8, temperature=0)


@contextlib.contextmanager
def _running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A `djinn` that ends with the block, and does not hear of Ctrl-C itself. Its standard output is for the block."""
    process = subprocess.Popen(child_command(*arguments), stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def _as_interrupt() -> Iterator[None]:
    """In the block SIGTERM, and SIGHUP of a closed terminal, do what Ctrl-C does: no server outlives the demo."""

    def hear(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


COMPARISONS = ("density", "capacity")
"""The experiments of `loadgen` that other servers take part in."""


def bench(output: str, rivals: str | None, *, full: bool) -> int:
    """Write the reports to the folder `output`; returns the load generator's exit status: 2 without its packages.

    `rivals` are the other servers, with commas; None: those that are installed. `full` measures for hours.
    """
    # -P: the working folder may have its own `loadgen`.
    command = [sys.executable, "-P", "-m", "loadgen", "all", "--only", ",".join(COMPARISONS), "--output", output]
    command += [] if full else ["--quick"]
    command += [] if rivals is None else ["--rivals", rivals]
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # it hears of Ctrl-C too, and writes what it has measured
                continue
