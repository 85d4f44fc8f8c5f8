"""The options that say what the agents of a run are like."""

import argparse
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from loadgen.errors import LoadgenError
from loadgen.load.arrivals import Arrivals
from loadgen.load.think import ThinkTime, parse_think
from loadgen.load.workload import Load, Replay, Signals, Workload

DEFAULTS = Workload()

THINK_FORM = "LOW:HIGH|lognormal:MEDIAN:SIGMA"


def _think(text: str) -> ThinkTime:
    try:
        return parse_think(text)
    except LoadgenError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


OPTIONS: tuple[tuple[str, Callable[[str], Any], str, str], ...] = (
    ("agents", int, "N", "how many agents arrive"),
    ("arrivals", Arrivals, "|".join(Arrivals), "how the gaps between them are distributed"),
    ("rate", float, "N", "arrivals per second; inf: all at once"),
    ("burstiness", float, "N", "shape of gamma gaps: 1 is Poisson, less is burstier, more is more even"),
    ("context", int, "N", "tokens of the first prompt"),
    ("turns", int, "N", "turns of each agent"),
    ("resume_tokens", int, "N", "tokens of new text in each later turn"),
    ("completion_tokens", int, "N", "tokens generated in each turn"),
    ("think", _think, THINK_FORM, "seconds between turns"),
    ("eta_noise", float, "SIGMA", "how wrong agents are about their return: sigma of a lognormal factor, 0 is exact"),
    ("tool_share", float, "N", "share of turns that call a tool, from 0 to 1"),
    ("tool_completion_tokens", int, "N", "tokens generated in a turn that calls a tool"),
    ("tool_think", _think, THINK_FORM, "seconds that a tool takes"),
    ("system_tokens", int, "N", "tokens at the start of the first prompt that all agents share"),
    ("seed", int, "N", "of arrivals, think times, tool calls and texts"),
    ("time_scale", float, "N", "factor on arrival and think times; 0.1 is ten times as fast"),
    ("signals", Signals, "|".join(Signals), "what Djinn is told of think times"),
)
"""Field, type, form and meaning. What is not given is not set, so that it is known what was given."""


def add_workload_options(parser: argparse.ArgumentParser, defaults: Workload = DEFAULTS) -> None:
    """The fields of `Workload` with these defaults, and `--trace`, which stands for most of them."""
    parser.add_argument("--trace", type=Path, metavar="FILE", help="do what the agents of this trace did")
    add_drawn_options(parser, defaults=defaults)


def add_drawn_options(
    parser: argparse.ArgumentParser, *, but: Collection[str] = (), defaults: Workload = DEFAULTS
) -> None:
    """The fields of `Workload` with these defaults, but for those that the experiment decides."""
    for name, read, form, text in OPTIONS:
        if name not in but:
            help_text = f"{text} (default: {getattr(defaults, name)})"
            parser.add_argument(_flag(name), type=read, default=argparse.SUPPRESS, metavar=form, help=help_text)


def read_workload(options: argparse.Namespace, defaults: Workload = DEFAULTS) -> Workload | Replay:
    """What the options say. Raises `LoadgenError` for values that do not fit, and for any that a trace decides."""
    if options.trace is None:
        return read_drawn(options, defaults)
    given = _given(options)
    if decided := given.keys() - {field.name for field in fields(Load)}:
        names = ", ".join(_flag(name) for name, *_ in OPTIONS if name in decided)
        raise LoadgenError(f"leave out {names}: --trace decides it")
    return Replay(trace=options.trace, **given)


def read_drawn(options: argparse.Namespace, defaults: Workload = DEFAULTS) -> Workload:
    """What the options say of agents whose trace is drawn. Raises `LoadgenError` for values that do not fit."""
    return replace(defaults, **_given(options))


def _given(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name, *_ in OPTIONS if hasattr(options, name)}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
