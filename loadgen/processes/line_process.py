"""A program beside the load generator, which never imports PyTorch itself: it is asked in lines of JSON."""

import asyncio
import json
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from tempfile import TemporaryFile
from typing import IO, Any

from loadgen.errors import LoadgenError

LINE_LIMIT = 1 << 24
SPIN_COUNT = "4000"
"""How long the program's OpenMP threads spin for more work, as `djinn serve` has it for its own: by default they do so
for milliseconds, and with the server on the same cores a copy takes a time slice of the scheduler."""

LOG_CHARACTERS = 500


class LineProcess:
    """A running program that answers each line with one line. `failure` is the error that says what went wrong."""

    def __init__(self, process: Process, log: IO[bytes], failure: type[LoadgenError]) -> None:
        self._process = process
        self._log = log
        self._failure = failure

    async def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer to `what`. Raises `failure` if it has ended, or says something else than an answer."""
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None
        assert sink is not None
        with suppress(ConnectionError):
            sink.write(json.dumps(what).encode() + b"\n")
            await sink.drain()
        line = await source.readline()
        if not line:
            await self._process.wait()
            raise self._failure(f"it ended with status {self._process.returncode}: {self._last_words()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._failure(f"it did not answer, but say {line[:LOG_CHARACTERS]!r}") from None
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-LOG_CHARACTERS:].strip()


@asynccontextmanager
async def line_process(command: Sequence[str], failure: type[LoadgenError]) -> AsyncIterator[LineProcess]:
    """The program, until the block ends.

    In a session of its own: Ctrl-C is for the load generator, which ends it.
    """
    with TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=log,
            limit=LINE_LIMIT,
            env={"GOMP_SPINCOUNT": SPIN_COUNT, **os.environ},
            start_new_session=True,
        )
        try:
            yield LineProcess(process, log, failure)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
