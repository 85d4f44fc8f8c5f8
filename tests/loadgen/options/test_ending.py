"""A run that is terminated ends as an interrupted one does."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.processes import hear_interrupts

BLOCKING = """
import time
from loadgen.options.ending import sigterm_as_interrupt
with sigterm_as_interrupt():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted")
"""
ASYNCHRONOUS = """
import asyncio
from loadgen.options.ending import sigterm_as_interrupt
async def run():
    try:
        print("ready", flush=True)
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("cancelled")
        return "and its result is kept"
with sigterm_as_interrupt():
    print(asyncio.run(run()))
"""
OVER = """
import time
from loadgen.options.ending import sigterm_as_interrupt
with sigterm_as_interrupt():
    pass
print("ready", flush=True)
time.sleep(60)
"""


def ignore_interrupts() -> None:
    """As a shell has it for what it runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def terminated(code: str, prepare: Callable[[], None]) -> tuple[int, list[str]]:
    """Exit status and lines of a program that gets SIGTERM once it is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, preexec_fn=prepare
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        said, _ = process.communicate(timeout=30)
    return process.returncode, said.splitlines()


@pytest.mark.parametrize("prepare", [hear_interrupts, ignore_interrupts])
def test_what_blocks_is_interrupted(prepare: Callable[[], None]) -> None:
    assert terminated(BLOCKING, prepare) == (0, ["interrupted"])


def test_what_is_asynchronous_is_cancelled_and_its_result_is_not_lost() -> None:
    assert terminated(ASYNCHRONOUS, hear_interrupts) == (0, ["cancelled", "and its result is kept"])


def test_behind_the_block_all_is_as_it_was() -> None:
    assert terminated(OVER, hear_interrupts) == (-signal.SIGTERM, [])
