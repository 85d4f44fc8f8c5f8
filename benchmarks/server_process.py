"""A server under test as a process of its own: started, waited for, stopped with all of its children."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.5
KILL_POLL_S = 0.01
LOG_TAIL_CHARACTERS = 3000


class ServerFailedError(Exception):
    """The server ended, did not answer in time, or gave another answer than it was asked for."""


@contextmanager
def running_server(command: list[str], environment: dict[str, str], base_url: str) -> Iterator[int]:
    """Runs `command` until the block ends; yields its POSIX session id once `base_url` lists its models.

    Raises ServerFailedError, with the end of the server's log, where the start or what the block asked of it fails.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, base_url)
            yield process.pid
        except (httpx.HTTPError, ServerFailedError) as error:
            log.seek(0)
            tail = log.read().decode(errors="replace")[-LOG_TAIL_CHARACTERS:]
            raise ServerFailedError(f"{error}\n{tail}") from error
        finally:
            _stop(process)


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], base_url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailedError(f"the server ended with status {process.returncode}")
        try:
            if httpx.get(f"{base_url}/v1/models").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL_S)
    raise ServerFailedError(f"the server did not answer within {START_TIMEOUT_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to end, then kills what is left of its session: the next target gets the cores for itself."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(KILL_POLL_S)
