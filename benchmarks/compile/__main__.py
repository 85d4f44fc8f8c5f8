"""`python -m benchmarks.compile`: the CUDA kernels compiled for devices that are not there, in the shapes that are
served. It needs Triton and no GPU, and takes a minute for each device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from rich.console import Console

from benchmarks.compile.table import kernel_tables, summary
from benchmarks.compile.usage import SHARED_KIB
from benchmarks.record import RESULTS, utc_now, write_results
from loadgen.options.common import EXIT_OK
from loadgen.report.tables import to_markdown, to_rich


@dataclass(frozen=True, slots=True)
class CompileRun:
    """`kernels`: a row for each kernel in each shape, for each compute capability. The record of a compiler, not of
    this machine.
    """

    date: str
    triton: str
    kernels: list[dict[str, Any]]


def main() -> int:
    """Run it as the command line asks; returns the process's exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks.compile", description=__doc__)
    parser.add_argument(
        "--capability", type=int, choices=SHARED_KIB, action="append", help="such as 90 for sm_90; default: all"
    )
    parser.add_argument("--shapes", choices=("usual", "main", "every"), default="main", help="default: main")
    parser.add_argument("--output", type=Path, help=f"folder for the result; default: {RESULTS.name}, none for usual")
    arguments = parser.parse_args()
    console, kernels = Console(), list[dict[str, Any]]()
    for capability in arguments.capability or SHARED_KIB:
        with console.status(f"compiling for sm_{capability}"):
            kernels += compile_for(capability, arguments.shapes)
    run = CompileRun(utc_now(), triton.__version__, kernels)
    tables = kernel_tables(kernels)
    console.print(to_rich(tables))
    console.print(summary(kernels), highlight=False)
    output = arguments.output or (None if arguments.shapes == "usual" else RESULTS)
    if output is not None:
        heading = f"# Kernels compiled by Triton {run.triton}, {run.date}\n\n{summary(kernels)}\n\n"
        stem = f"compile-{run.date.replace(':', '')}"
        console.print(f"written: {write_results(output, stem, run, heading + ''.join(map(to_markdown, tables)))}")
    return EXIT_OK


def compile_for(capability: int, shapes: str) -> list[dict[str, Any]]:
    """The rows of one device, made in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.compile.child", str(capability), shapes]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return list(map(json.loads, output.splitlines()))


if __name__ == "__main__":
    sys.exit(main())
