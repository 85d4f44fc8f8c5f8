"""The programs that Djinn is compared with, and what there is of each."""

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from loadgen.errors import LoadgenError
from loadgen.experiments.weights.findings import Way
from loadgen.experiments.weights.generation import Generation
from loadgen.load.prompts import TokenIds
from loadgen.processes.line_process import LineProcess, line_process

PROGRAMS = {
    Way.DOUBLE_BUFFER: "loadgen.rivals.double_buffer",
    Way.ACCELERATE: "loadgen.rivals.offload.accelerate",
}
"""Modules, each of which `python -m` runs."""


class ProgramFailed(LoadgenError):
    """A program ended. The text says why."""


class Program:
    """A program that generates; `about` is what it says of itself. All raises `ProgramFailed` if it has ended."""

    def __init__(self, process: LineProcess, about: Mapping[str, Any]) -> None:
        self._process = process
        self.about = about

    async def generate(self, prompts: Sequence[TokenIds], tokens: int) -> Generation:
        """All prompts, which are of one length, as one static batch."""
        found = await self._process.ask({"prompts": prompts, "tokens": tokens})
        return Generation(found["token_ids"], [found["seconds"]] * len(prompts))

    async def copy(self, passes: int) -> float:
        """Bytes a second of copying what so many passes stream, of a program that can do that alone."""
        found = await self._process.ask({"passes": passes})
        rate: float = found["bytes"] / found["seconds"]
        return rate


@asynccontextmanager
async def running(way: Way, setup: Mapping[str, Any]) -> AsyncIterator[Program]:
    """The program of that way, ready to generate, until the block ends. Raises `ProgramFailed`."""
    async with line_process([sys.executable, "-m", PROGRAMS[way]], ProgramFailed) as process:
        yield Program(process, await process.ask(setup))
