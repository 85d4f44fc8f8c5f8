"""`python -m loadgen.demo`: start a server, drive a dozen agents against it, print the report, stop the server."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loadgen.cli import main
from loadgen.commands.common import EXIT_UNUSABLE

READY_LINE = "Djinn serves "
STOP_TIMEOUT_S = 60

LOAD = (
    *("--agents", "12", "--rate", "0.2", "--context", "512", "--turns", "3"),
    *("--think", "10:20", "--completion-tokens", "48", "--time-scale", "0.2", "--seed", "1"),
)
"""Agents that think for 10 to 20 seconds, at five times the speed."""


@contextmanager
def serving(command: Sequence[str]) -> Iterator[str]:
    """Run a server for the time of the block; gives its URL. Raises RuntimeError if it ends before it is ready."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = next((line for line in server.stdout if line.startswith(READY_LINE)), None)
            if ready is None:
                raise RuntimeError(f"{' '.join(command)} ended with status {server.wait()}")
            print(ready.strip(), flush=True)
            yield ready.split()[-1]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(STOP_TIMEOUT_S)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the load generator's exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.demo", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what the server serves")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="folder for the report's JSON")
    options = parser.parse_args(argv)
    djinn = Path(sys.executable).with_name("djinn")
    try:
        with serving([str(djinn), "serve", "--model", options.model, "--port", "0", "--state-dir", "none"]) as url:
            return main(["density", "--target", f"djinn={url}", "--output", str(options.output), *LOAD])
    except (RuntimeError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_UNUSABLE


if __name__ == "__main__":
    sys.exit(run())
