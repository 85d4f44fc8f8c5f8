"""A server as a process of its own: started, waited for, stopped with all of its children."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import httpx
import psutil

from loadgen.errors import LoadgenError

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.5
KILL_POLL_S = 0.01
LOG_TAIL_BYTES = 3000


class ServerFailedError(LoadgenError):
    """The server ended, did not answer in time, or gave another answer than it was asked for."""


@contextmanager
def running_server(
    command: list[str], environment: dict[str, str], base_url: str, log: Path | None = None
) -> Iterator[int]:
    """Runs `command` until the block ends; yields its POSIX session id once `base_url` lists its models.

    What it says goes to the file `log`, or nowhere. Raises ServerFailedError, with the end of what it said, where the
    start or what the block asked of it fails.
    """
    with starting_server(command, environment, log) as process:
        wait_until_ready(process, base_url)
        yield process.pid


@contextmanager
def starting_server(
    command: list[str], environment: dict[str, str], log: Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    """The same, for a block that waits until the server is ready by itself."""
    with tempfile.TemporaryFile() if log is None else log.open("w+b") as output:
        process = spawn(command, environment, output)
        try:
            yield process
        except (httpx.HTTPError, ServerFailedError) as error:
            raise ServerFailedError(f"{error}\n{log_tail(output)}") from error
        finally:
            stop_server(process.pid)
            process.wait()


def spawn(
    command: Sequence[str], environment: Mapping[str, str], output: BinaryIO, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start it, in `folder` if that is given, in a POSIX session of its own: out of reach of the terminal's Ctrl-C."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_until_ready(process: subprocess.Popen[bytes], base_url: str) -> None:
    """Wait until the server lists its models. Raises ServerFailedError if it ends before that, or takes too long."""
    for _ in unready(process, base_url):
        time.sleep(POLL_S)


def unready(process: subprocess.Popen[bytes], base_url: str) -> Iterator[None]:
    """Yields whenever it finds the server not ready yet: wait a little before the next. Raises ServerFailedError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client() as http:  # to make one takes longer than a look
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerFailedError(f"the server ended with status {process.returncode}")
            with suppress(httpx.TransportError):
                if http.get(f"{base_url}/v1/models").is_success:
                    return
            yield
    raise ServerFailedError(f"the server did not answer within {START_TIMEOUT_S:.0f} s")


def stop_server(pid: int) -> None:
    """Asks the server to end, then kills what is left of its session and children: the next one gets the cores.

    An interrupt, such as a second Ctrl-C, only ends the wait for the server: all is killed even then.
    """
    family: list[psutil.Process] = []
    try:
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(pid)
            family = [server, *server.children(recursive=True)]
            server.terminate()
            psutil.wait_procs([server], STOP_TIMEOUT_S)
    finally:
        _kill(pid, family)


def _kill(session: int, family: list[psutil.Process]) -> None:
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, STOP_TIMEOUT_S)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(session, signal.SIGKILL)
            time.sleep(KILL_POLL_S)


def log_tail(output: BinaryIO) -> str:
    """The end of what the server said. It may still write: its place in the file, which is also ours, stays."""
    start = max(0, os.fstat(output.fileno()).st_size - LOG_TAIL_BYTES)
    return os.pread(output.fileno(), LOG_TAIL_BYTES, start).decode(errors="replace")


def free_port() -> int:
    """A free TCP port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of the loopback address now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
