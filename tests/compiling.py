"""Compiles the CPU's kernels once for all processes of a run. Each would take twenty seconds, at the same time."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory


async def _compile_for_servers() -> None:
    from tests.serving import running_services

    async with running_services():
        pass


def _compile_for_engines(folder: Path) -> None:
    from tests.gpu.breakpoints.breaking import BreakDriver
    from tests.gpu.breakpoints.breaking_models import make_tiny, prompt

    driver = BreakDriver(make_tiny("llama", folder).engine())
    driver.settle(driver.begin(driver.open(), prompt(0, 20), 4))
    driver.engine.close()


def compile_kernels(done: Path) -> None:
    """In a process of its own: make the file `done` when all kernels are in the cache, or cannot be compiled."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        asyncio.run(_compile_for_servers())
        with TemporaryDirectory() as folder:
            _compile_for_engines(Path(folder))
    finally:
        done.touch()
