"""`djinn bench`: agents that think, on Djinn and on each other server that is installed."""

import subprocess
import sys

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
