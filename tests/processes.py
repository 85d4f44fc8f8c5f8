"""Servers in processes that can be killed and started again in no time, and what they say of themselves."""

import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ForkServer
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx

from app.serve import SPIN_COUNT
from tests.waiting import wait_until

START_TIMEOUT_S = 120
READY = re.compile(r"Djinn serves \S+ on (http://\S+:\d+)\n")
TINY = ("--model", "random:tiny-llama", "--port", "0", "--kv-device", "4MiB", "--kv-host", "16MiB")
IMPORTED = [
    "app.main",
    "app.web.server",
    "app.gpu.startup.loader",
    "app.gpu.kernels.cpu.elementwise",
    "app.gpu.kernels.attention.cpu",
    "app.gpu.kernels.linear.panels",
    "app.gpu.forward.programs",
    "transformers.models.llama.modeling_llama",
    "tests.frozen",
]
"""What a start with the tiny model imports, Numba and Transformers among it. What is last freezes all of it."""


def forking() -> ForkServerContext:
    """Processes that begin as forks of one that has imported PyTorch and all of Djinn, which takes seconds."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # as `djinn serve` does: it counts when PyTorch is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class _SharedForks(ForkServer):
    """Forks of a process that another one has started."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._forkserver_address = address
        self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the one that keeps it is where it was started

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()


def address_of_forks() -> str:
    """Where other processes find what this one forks from; it is started if it is not there.

    Empty for a Python whose processes share no key with each other.
    """
    if sys.version_info >= (3, 14):
        return ""
    forking()
    forkserver.ensure_running()
    address: str = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    return address


def use_forks_of(address: str) -> None:
    """From here on, `forking` has processes from there."""
    if address:
        forkserver.connect_to_new_process = _SharedForks(address).connect_to_new_process


def hear_interrupts() -> None:
    """For `preexec_fn`: a suite that runs in the background ignores Ctrl-C, and its children would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _serve(
    output: str,
    flags: Sequence[str],
    descriptors: tuple[int, int] | None,
    own_engine: bool,
    prepare: Callable[[], None] | None,
) -> None:
    """In the new process: what `djinn serve` does, with stdout and stderr in the file `output`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a suite that `nohup` runs would have it ignored
    if not own_engine:
        from app.engine_process import engine

        engine.EngineProcess = lambda timeout_s, stuck_s: None  # type: ignore[assignment, misc]
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if prepare is not None:
        prepare()
    from app.cli import main

    raise SystemExit(main(["serve", *flags]))


class ServerProcess:
    """A running `djinn serve`."""

    def __init__(self, process: BaseProcess, url: str, output: Path) -> None:
        self._process = process
        self.url = url
        self.output = output
        """What it has printed and logged."""
        assert process.pid is not None
        self.pid = process.pid

    def kill(self) -> None:
        """`kill -9`."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, and wait for the orderly end."""
        self._end(signal.SIGTERM)

    def exit_status(self, timeout_s: float) -> int | None:
        """Wait for the end; None if it has not come."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def _end(self, with_signal: signal.Signals) -> None:
        if self._process.is_alive():
            os.kill(self.pid, with_signal)
        self._process.join(START_TIMEOUT_S)


@contextmanager
def serve_process(
    folder: Path,
    *flags: str,
    descriptors: tuple[int, int] | None = None,
    own_engine: bool = False,
    prepare: Callable[[], None] | None = None,
) -> Iterator[ServerProcess]:
    """A server of a tiny model that keeps its sessions in `folder`; it is killed at the end of the block.

    `descriptors` are the soft and the hard limit of its open files; None for those of the tests. Its engine has an
    `own_engine` process, which takes seconds to start, or a thread. `prepare` is called in the process first.
    """
    output = folder.with_name(f"{folder.name}.out")
    output.unlink(missing_ok=True)
    arguments = (str(output), [*TINY, "--state-dir", str(folder), *flags], descriptors, own_engine, prepare)
    process = forking().Process(target=_serve, args=arguments)
    process.start()
    try:
        yield ServerProcess(process, _url(process, output), output)
    finally:
        process.kill()
        process.join()
        process.close()


def until_ready(http: httpx.Client) -> None:
    """Wait for an engine that is being started."""
    wait_until(lambda: http.get("/ready").status_code == 200)


def metric(http: httpx.Client, name: str) -> float:
    """The value of a metric without labels."""
    [line] = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


def _url(process: BaseProcess, output: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.is_alive():
        if output.exists() and (ready := READY.search(output.read_text())):
            return ready[1]
        time.sleep(0.01)
    raise RuntimeError(f"the server did not start: {output.exists() and output.read_text()}")
