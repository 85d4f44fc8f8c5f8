"""A load generator as a process of its own: what both have in common."""

import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.generators.load import Load
from benchmarks.generators.measured import Measured
from loadgen.processes.process import ServerFailedError, log_tail, spawn, stop_server

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model on an OpenAI server. `tokenizer` is the model's folder."""

    url: str
    model: str
    tokenizer: Path


class Generator(Protocol):
    """Puts a load on an endpoint and measures."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def run(self, endpoint: Endpoint, load: Load, seed: int) -> Measured:
        """Every seed gives other texts, and the same arrivals for every generator. Raises ServerFailedError."""
        ...


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for what is asked of a generator and what it answers."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def run_generator(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """Runs it in `folder`, silently; whatever processes it started are gone at the end.

    Raises ServerFailedError, with the end of what it said, if it fails or takes longer than `TIMEOUT_S`.
    """
    with tempfile.TemporaryFile() as output:
        process = spawn(command, environment, output, folder)
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ServerFailedError(f"{command[0]} took longer than {TIMEOUT_S:.0f} s\n{log_tail(output)}") from error
        finally:
            stop_server(process.pid)
            process.wait()
        if status:
            raise ServerFailedError(f"{' '.join(command)} ended with status {status}\n{log_tail(output)}")
