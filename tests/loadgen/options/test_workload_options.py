"""Options become the workload that they name, or are refused by name."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from loadgen.errors import LoadgenError
from loadgen.load.arrivals import Arrivals
from loadgen.load.think import LogNormal, Uniform
from loadgen.load.workload import Replay, Signals, Workload
from loadgen.options.workload import OPTIONS, add_workload_options, read_workload


def read(*arguments: str) -> Workload | Replay:
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    return read_workload(parser.parse_args(arguments))


def test_without_options_it_is_the_default() -> None:
    assert read() == Workload()


def test_an_experiment_may_have_defaults_of_its_own() -> None:
    parser, usual = argparse.ArgumentParser(), Workload(agents=3, context=200, rate=2.0)
    add_workload_options(parser, usual)
    assert read_workload(parser.parse_args([]), usual) == usual
    assert read_workload(parser.parse_args(["--rate", "4"]), usual) == replace(usual, rate=4.0)
    assert "how many agents arrive (default: 3)" in parser.format_help()


def test_every_field_has_an_option() -> None:
    assert sorted(name for name, *_ in OPTIONS) == sorted(field.name for field in fields(Workload))


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--agents", "80", "--rate", "inf"], {"agents": 80, "rate": float("inf")}),
        (["--arrivals", "gamma", "--burstiness", "0.5"], {"arrivals": Arrivals.GAMMA, "burstiness": 0.5}),
        (["--arrivals", "constant"], {"arrivals": Arrivals.CONSTANT}),
        (["--think", "10:20"], {"think": Uniform(10.0, 20.0)}),
        (["--think", "lognormal:12:0.5", "--eta-noise", "0.3"], {"think": LogNormal(12.0, 0.5), "eta_noise": 0.3}),
        (
            ["--tool-share", "0.7", "--tool-completion-tokens", "8", "--tool-think", "0:1"],
            {"tool_share": 0.7, "tool_completion_tokens": 8, "tool_think": Uniform(0.0, 1.0)},
        ),
        (["--signals", "ready", "--time-scale", "0.1"], {"signals": Signals.READY, "time_scale": 0.1}),
    ],
)
def test_an_option_sets_its_field(arguments: list[str], changes: dict[str, Any]) -> None:
    assert read(*arguments) == replace(Workload(), **changes)


def test_a_trace_is_replayed_with_what_it_does_not_decide() -> None:
    arguments = [
        "--trace",
        "a.jsonl",
        "--seed",
        "7",
        "--signals",
        "none",
        "--time-scale",
        "0.5",
        "--system-tokens",
        "9",
    ]
    expected = Replay(trace=Path("a.jsonl"), seed=7, signals=Signals.NONE, time_scale=0.5, system_tokens=9)
    assert read(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--agents", "8"], "--agents"),
        (["--turns", "3", "--seed", "1"], "--turns"),
        (["--think", "5:15", "--burstiness", "1"], "--burstiness, --think"),
        (["--eta-noise", "0", "--tool-share", "0"], "--eta-noise, --tool-share"),
    ],
)
def test_what_a_trace_decides_is_refused_even_where_it_is_the_default(arguments: list[str], named: str) -> None:
    with pytest.raises(LoadgenError, match=f"^leave out {named}: --trace decides it"):
        read("--trace", "a.jsonl", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agents", "few"], "--agents"),
        (["--arrivals", "weekly"], "--arrivals"),
        (["--think", "5"], "think time must be LOW:HIGH or lognormal:MEDIAN:SIGMA, not '5'"),
        (["--tool-think", "lognormal:0:1"], "a MEDIAN above 0"),
        (["--signals", "some"], "--signals"),
    ],
)
def test_what_cannot_be_read_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
