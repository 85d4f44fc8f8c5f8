"""A peer that serves: for the length of a block, or until a command stops it."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

from loadgen.errors import LoadgenError
from loadgen.peers.base import Peer, ServerSettings
from loadgen.processes.launch import ROOT, Calibration, Launch, peers_folder, without_folders
from loadgen.processes.process import (
    POLL_S,
    ServerFailedError,
    free_port,
    is_free,
    log_tail,
    spawn,
    starting_server,
    stop_server,
    unready,
    wait_until_ready,
)
from loadgen.targets.base import TargetSpec


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is up.

    `model` is None if it is spoken to as Djinn. `command` is how it was started, as it may be published, and `log` has
    what it says.
    """

    name: str
    url: str
    model: str | None
    pid: int
    command: tuple[str, ...]
    versions: Mapping[str, str]
    log: Path
    calibration: Calibration | None = None

    @property
    def target(self) -> str:
        """What `--target` takes to measure it."""
        return f"{self.name}={self.url}" + ("" if self.model is None else f"#{self.model}")

    @property
    def spec(self) -> TargetSpec:
        """The same, with what is known of its process."""
        spec = TargetSpec.parse(self.target)
        return replace(spec, pid=self.pid, command=self.command, versions=self.versions, calibration=self.calibration)


@contextmanager
def serving(peer: Peer, settings: ServerSettings) -> Iterator[Served]:
    """A server of that kind on a free port until the block ends; its log stays.

    Raises `LoadgenError` if it is not installed, cannot run with these settings, or does not come up, then with the
    end of its log.
    """
    with _starting(peer, settings) as (process, served):
        wait_until_ready(process, served.url)
        yield served


def check_installed(peer: Peer) -> None:
    """Raise `LoadgenError`, which says what to do, unless it is."""
    if not peer.is_installed():
        raise LoadgenError(f"{peer.name} is not installed: python -m loadgen peers install {peer.name}")


def log_file(name: str) -> Path:
    """Where a server's output goes."""
    folder = peers_folder() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.log"


def published(launch: Launch, settings: ServerSettings) -> tuple[str, ...]:
    """The command without what it tells about this machine's folders."""
    folders = [ROOT, peers_folder(), settings.model.parent]
    return without_folders(launch, folders if settings.state is None else [*folders, settings.state.parent]).as_words()


@dataclass(frozen=True, slots=True)
class ManagedTarget:
    """A target that is started for its run and stopped after it: an `Access`."""

    name: str
    peer: Peer
    settings: ServerSettings
    running: None = None

    @asynccontextmanager
    async def reach(self) -> AsyncIterator[TargetSpec]:
        with _starting(self.peer, self.settings) as (process, served):
            for _ in unready(process, served.url):
                await asyncio.sleep(POLL_S)
            yield replace(served.spec, name=self.name)


@contextmanager
def _starting(peer: Peer, settings: ServerSettings) -> Iterator[tuple[subprocess.Popen[bytes], Served]]:
    check_installed(peer)
    port = free_port()
    launch = peer.launch(settings, port)
    log = log_file(f"{peer.name}-{port}")
    url = f"http://127.0.0.1:{port}"
    with starting_server(launch.command, launch.environment, log) as process:
        command, versions = published(launch, settings), peer.versions()
        yield (
            process,
            Served(peer.name, url, peer.served_model, process.pid, command, versions, log, launch.calibration),
        )


SAME_START_S = 2.0
"""By how much the start time of one process can seem to differ, when the clock is set."""


class Note(BaseModel):
    """What is remembered of a server. `created_s` (seconds since the epoch) tells it from a later one with its pid."""

    pid: int
    created_s: float
    url: str

    def is_running(self) -> bool:
        """Whether the pid is still that of this server."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            is_dead = process.status() == psutil.STATUS_ZOMBIE
            return not is_dead and abs(process.create_time() - self.created_s) < SAME_START_S
        return False


def running(peer: Peer) -> Note | None:
    """The note about the peer if it is running; one that is out of date is removed."""
    file = _note_file(peer)
    try:
        note = Note.model_validate_json(file.read_text())
    except FileNotFoundError:
        return None
    except ValidationError:
        note = None
    if note is None or not note.is_running():
        file.unlink()
        return None
    return note


def start(peer: Peer, settings: ServerSettings, port: int | None) -> Served:
    """Start it, on a free port unless told which, and leave it running once it is ready.

    Raises `LoadgenError` if it is running already or not installed, or if the port is taken, and `ServerFailedError`
    with the end of its log if it does not come up.
    """
    check_installed(peer)
    if (note := running(peer)) is not None:
        raise LoadgenError(f"{peer.name} is running already, as process {note.pid} on {note.url}")
    if port is not None and not is_free(port):
        raise LoadgenError(f"port {port} is taken")
    port = free_port() if port is None else port
    launch, log, url = peer.launch(settings, port), log_file(peer.name), f"http://127.0.0.1:{port}"
    with log.open("w+b") as output:
        process = spawn(launch.command, launch.environment, output)
        try:
            _write_note(peer, process.pid, url)
            wait_until_ready(process, url)
        except BaseException as error:
            stop_server(process.pid)
            process.wait()
            _note_file(peer).unlink(missing_ok=True)
            if isinstance(error, ServerFailedError):
                raise ServerFailedError(f"{peer.name}: {error}; the end of {log}:\n{log_tail(output)}") from error
            raise
    process.returncode = 0  # it is no child to wait for
    return Served(peer.name, url, peer.served_model, process.pid, published(launch, settings), peer.versions(), log)


def stop(peer: Peer) -> Note:
    """Stop it with all of its children. Raises `LoadgenError` if it is not running."""
    note = running(peer)
    if note is None:
        raise LoadgenError(f"{peer.name} is not running, or was not started with `peers start`")
    stop_server(note.pid)
    _note_file(peer).unlink(missing_ok=True)
    return note


def _write_note(peer: Peer, pid: int, url: str) -> None:
    file = _note_file(peer)
    file.parent.mkdir(parents=True, exist_ok=True)
    with suppress(psutil.NoSuchProcess):  # it is gone already, which the wait for it will tell
        file.write_text(Note(pid=pid, created_s=psutil.Process(pid).create_time(), url=url).model_dump_json())


def _note_file(peer: Peer) -> Path:
    return peers_folder() / "running" / f"{peer.name}.json"
