"""Memory that a process has freed, seen from outside of it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

MIB = 1 << 20
FREE_MUCH = """
import psutil
from app.machine.memory import give_back_freed
held = psutil.Process().memory_info
parts = [bytes(1000) for _ in range(100_000)]
last = bytes(1000)  # above all of them: the C library keeps what is below
full = held().rss
parts.clear()
freed = held().rss
give_back_freed()
print(full - freed, freed - held().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to give memory back")
def test_what_was_freed_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", FREE_MUCH], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 10 * MIB
    assert after > 80 * MIB
