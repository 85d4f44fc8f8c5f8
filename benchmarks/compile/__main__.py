"""`python -m benchmarks.compile`: the CUDA kernels compiled for devices that are not there, in the shapes that are
served. It needs Triton and no GPU, and takes a minute for each device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from rich.console import Console

from benchmarks.compile.child import SHARED_KIB
from benchmarks.record import RESULTS, utc_now, write_results
from loadgen.options.common import EXIT_OK
from loadgen.report.tables import Row, Table, to_markdown, to_rich

NOTE = "Registers and spilled bytes are of a thread, programs at once of a multiprocessor. `*_merge` joins split keys."
COLUMNS = {
    "head": "head_dim",
    "group": "group",
    "block": "block_size",
    "type": "dtype",
    "registers": "registers",
    "spilled, bytes": "stack_bytes",
    "asynchronous copies": "async_copies",
}
Compiled = dict[str, Any]


def kernel_tables(kernels: Sequence[Compiled]) -> list[Table]:
    """One for each compute capability."""
    tables: dict[str, list[Row]] = {}
    for each in kernels:
        row: Row = {
            "for": f"{each['purpose']} {each['kernel']}" if each["kernel"] == "_merge" else each["purpose"],
            **{column: each[name] for column, name in COLUMNS.items()},
            "shared, KiB": each["shared_bytes"] / 1024,
            "tensor-core instructions": each["mma"] + each["wgmma"],
            "programs at once": each["programs"] or "none",
        }
        tables.setdefault(f"sm_{each['capability']}", []).append(row)
    return [Table(title, rows, NOTE) for title, rows in tables.items()]


def summary(kernels: Sequence[Compiled]) -> str:
    """What one wants to know first."""
    spilled = [each for each in kernels if each["stack_bytes"]]
    most = max(spilled, key=lambda each: each["stack_bytes"], default=None)
    begin = f"{len(kernels)} kernels, {len(spilled)} of them spill registers"
    if most is None:
        return f"{begin}."
    where = f"{most['purpose']}, head {most['head_dim']}, {most['dtype']}, sm_{most['capability']}"
    return f"{begin}, {most['stack_bytes']} bytes at most ({where})."


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
