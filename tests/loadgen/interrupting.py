"""Ctrl-C while a command runs in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from tests.processes import hear_interrupts

TIMEOUT_S = 60


def interrupt(arguments: Sequence[str], under_way: Callable[[], bool], told: signal.Signals = signal.SIGINT) -> str:
    """Interrupt `python -m loadgen` once it is `under_way`. Its exit code must say so. Returns what it printed."""
    command = [sys.executable, "-m", "loadgen", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_interrupts) as process:
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not under_way():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(told)
            output, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    return output
