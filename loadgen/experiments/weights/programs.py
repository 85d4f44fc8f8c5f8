"""The programs that Djinn is compared with, and what there is of each."""

import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from loadgen.errors import LoadgenError
from loadgen.experiments.weights.findings import Way
from loadgen.experiments.weights.generation import Generation
from loadgen.load.prompts import TokenIds
from loadgen.peers.deepspeed import DeepSpeed
from loadgen.processes.launch import ROOT
from loadgen.processes.line_process import LineProcess, line_process

DOUBLE_BUFFER = "loadgen.rivals.double_buffer"
ACCELERATE = "loadgen.rivals.offload.accelerate"
ZERO_INFERENCE = "loadgen.rivals.offload.zero_inference"


class ProgramFailed(LoadgenError):
    """A program ended. The text says why."""


@dataclass(frozen=True, slots=True)
class Launch:
    """`python -m module` for one way, with what is added to the environment."""

    way: Way
    python: str
    module: str
    environment: Mapping[str, str] = field(default_factory=dict)


def launches() -> Iterator[Launch]:
    """Those that are installed."""
    yield Launch(Way.DOUBLE_BUFFER, sys.executable, DOUBLE_BUFFER)
    yield Launch(Way.ACCELERATE, sys.executable, ACCELERATE)
    deepspeed = DeepSpeed()
    if deepspeed.is_installed():
        python, environment = str(deepspeed.environment.python), {"PYTHONPATH": str(ROOT), "LOCAL_RANK": "0"}
        yield Launch(Way.DEEPSPEED, python, ZERO_INFERENCE, environment)


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
async def running(launch: Launch, setup: Mapping[str, Any]) -> AsyncIterator[Program]:
    """The program, ready to generate, until the block ends. Raises `ProgramFailed`."""
    command = [launch.python, "-m", launch.module]
    async with line_process(command, ProgramFailed, launch.environment) as process:
        yield Program(process, await process.ask(setup))
