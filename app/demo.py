"""`djinn demo` and `djinn bench`: agents that arrive, think and come back."""

import contextlib
import itertools
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from types import FrameType

SERVER = ("serve", "--port", "0", "--state-dir", "none", "--kv-device", "6x800")
"""The device holds half of the agents."""
AGENTS = {
    "--agents": "12",
    "--rate": "0.5",
    "--context": "512",
    "--turns": "4",
    "--think": "10:20",
    "--completion-tokens": "48",
    "--time-scale": "0.5",
}
"""They think for half as long as agents do whose tools run for 10 to 20 s."""
READY = re.compile(r"Djinn serves .+ on (http://\S+)")
ENDS_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()
"""What a command begins with so that the kernel ends it when the demo dies; Linux alone can."""
ENDING_S = 15.0
"""How long a process may take to end before it is killed."""


def demo(model: str, *, opens: bool) -> int:
    """Serve `model` on a free port and let agents come until Ctrl-C. `opens`: show the page in the browser.

    Returns the exit status: the server's if it does not start, the agents' if they fail.
    """
    with _as_interrupt(), _running("app", *SERVER, "--model", model) as server:
        assert server.stdout is not None
        found = next(filter(None, map(READY.match, server.stdout)), None)
        if found is None:  # it has said why
            return server.wait()
        print(f"Djinn is at {found[1]}: watch a dozen agents there. Ctrl-C ends them and the server.", flush=True)
        if opens:
            webbrowser.open(found[1])
        for seed in itertools.count(1):
            if status := _send_agents(found[1], seed):
                return status
    raise AssertionError("agents come without an end")


def _send_agents(url: str, seed: int) -> int:
    """A dozen agents from their arrival to their end. Returns their exit status."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {**AGENTS, "--target": f"djinn={url}", "--output": folder, "--seed": str(seed)}
        with _running("loadgen", "density", *itertools.chain(*flags.items())) as agents:
            said, _ = agents.communicate()
            if agents.returncode:
                print(said, end="", file=sys.stderr)
            return agents.returncode


@contextlib.contextmanager
def _running(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this interpreter that ends with the block. Its standard output is for the block."""
    # -P: the working folder may have its own `app`.
    command: Sequence[str] = [*ENDS_WITH_PARENT, sys.executable, "-P", "-m", module, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def _as_interrupt() -> Iterator[None]:
    """In the block SIGTERM does what Ctrl-C does, so that no server outlives the demo."""

    def hear(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


COMPARISONS = ("density", "capacity")
"""The experiments of `loadgen` that other servers take part in."""


def bench(output: str, rivals: str | None, *, full: bool) -> int:
    """Write the reports to the folder `output`; returns the load generator's exit status: 2 without its packages.

    `rivals` are the other servers, with commas; None: those that are installed. `full` measures for hours.
    """
    # -P: the working folder may have its own `loadgen`.
    command = [sys.executable, "-P", "-m", "loadgen", "all", "--only", ",".join(COMPARISONS), "--output", output]
    command += [] if full else ["--quick"]
    command += [] if rivals is None else ["--rivals", rivals]
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # it hears of Ctrl-C too, and writes what it has measured
                continue
