"""The options that say what the agents of a run are like, which are the fields of `Workload`, or a trace."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from loadgen.errors import LoadgenError
from loadgen.load.workload import Load, Replay, Workload
from loadgen.options.plan_fields import add_plan_options, flags, given, read_plan


def add_workload_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """The fields of `Workload`, and `--trace`, which stands for most of them."""
    parser.add_argument("--trace", type=Path, metavar="FILE", help="do what the agents of this trace did")
    add_plan_options(parser, Workload, **defaults)


def read_workload(options: argparse.Namespace, **defaults: Any) -> Workload | Replay:
    """What the options say. Raises `LoadgenError` for values that do not fit, and for any that a trace decides."""
    if options.trace is None:
        return read_plan(options, Workload, **defaults)
    found = given(options, Workload)
    if decided := found.keys() - {field.name for field in fields(Load)}:
        names = ", ".join(flag for name, flag in flags(Workload).items() if name in decided)
        raise LoadgenError(f"leave out {names}: --trace decides it")
    return Replay(trace=options.trace, **found)
