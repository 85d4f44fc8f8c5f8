"""A peer that serves: for the length of a block."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen.errors import LoadgenError
from loadgen.peers.base import Peer, ServerSettings
from loadgen.processes.calibration import Calibration
from loadgen.processes.folders import peers_folder
from loadgen.processes.launch import ROOT, Launch, without_folders
from loadgen.processes.process import POLL_S, free_port, starting_server, unready, wait_until_ready
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
