"""Peers that go on when the command that started them is done: a note about each, so that it can be stopped."""

from contextlib import suppress
from pathlib import Path

import psutil
from pydantic import BaseModel, ValidationError

from loadgen.errors import LoadgenError
from loadgen.peers.base import Peer, ServerSettings
from loadgen.peers.serving import Served, check_installed, log_file, published
from loadgen.processes.folders import peers_folder
from loadgen.processes.process import (
    ServerFailedError,
    free_port,
    is_free,
    log_tail,
    spawn,
    stop_server,
    wait_until_ready,
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
