"""Compiles the CPU's kernels once for all processes of a run. Each would take twenty seconds, at the same time."""

import asyncio
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils import logging

from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import make_tiny, prompt
from tests.serving import running_services


def begin_compiling(lock: Path) -> subprocess.Popen[bytes]:
    """Start a process that holds a lock on the file until all kernels are in the cache."""
    descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return subprocess.Popen([sys.executable, "-m", __name__], pass_fds=[descriptor])
    finally:
        os.close(descriptor)  # the process has its own


def wait_until_compiled(lock: Path) -> None:
    """Return when the process has ended that `begin_compiling` started, however it did."""
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)


async def _compile_for_servers() -> None:
    async with running_services():
        pass


def _compile_for_engines(folder: Path) -> None:
    driver = BreakDriver(make_tiny("llama", folder).engine())
    driver.settle(driver.begin(driver.open(), prompt(0, 20), 4))
    driver.engine.close()


if __name__ == "__main__":
    logging.disable_progress_bar()
    asyncio.run(_compile_for_servers())
    with TemporaryDirectory() as folder:
        _compile_for_engines(Path(folder))
