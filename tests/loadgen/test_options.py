"""What a command line says is checked before anything runs; what it ends with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from loadgen.cli import main
from loadgen.errors import LoadgenError
from loadgen.load.arrivals import Arrivals
from loadgen.load.think import LogNormal, Uniform
from loadgen.load.workload import Replay, Signals, Workload
from loadgen.options.common import finish
from loadgen.options.workload import add_workload_options, read_workload
from loadgen.results.files import Result
from loadgen.results.inputs import Server
from loadgen.results.per_target import PerTarget

UP = ("--target", "up=http://127.0.0.1:9")
OF_DENSITY = "See python -m loadgen density --help\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("schema", "kv", "--zzz"), "unknown flag --zzz. See python -m loadgen schema --help\n"),
        (("density", *UP, "--agent", "3"), f"unknown flag --agent; did you mean --agents? {OF_DENSITY}"),
        (("density",), f"missing --target. {OF_DENSITY}"),
        (("density", *UP, "--agents", "many"), f"--agents takes an integer, not 'many'. {OF_DENSITY}"),
        (("density", *UP, "--seed"), f"--seed takes an integer. {OF_DENSITY}"),
        (("density", "--target"), f"--target takes a value: TARGET. {OF_DENSITY}"),
        (
            ("density", "--target", "a=htp://"),
            "the URL of target a must be http://HOST[:PORT] or https://..., not 'htp://'\n",
        ),
        (
            ("density", "--target", "a=127.0.0.1:80"),
            "the URL of a target begins with http://: --target a=http://127.0.0.1:80\n",
        ),
        (
            ("peers", "start", "sglang"),
            "there is no peer 'sglang', only djinn, djinn+lru, djinn+none, djinn+tools, djinn+tools+signals, vllm, "
            "vllm+offload, llamacpp, transformers, ray; deepspeed can only be installed\n",
        ),
        (
            ("peers", "start", "deepspeed"),
            "deepspeed is a library without a server: it can be installed, but not started or measured\n",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert (code, *capsys.readouterr()) == (2, "", f"loadgen: {says}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["kv", "--target", "vllm"], "this experiment cannot measure vllm, only djinn, djinn+lru, djinn+none"),
        (["whitebox", "--target", "vllm"], "this experiment cannot measure vllm, only djinn, djinn+lru, djinn+none"),
        (["density", *UP, "--target", "vllm"], "vllm is not installed: python -m loadgen peers install vllm"),
        (["kv", *UP, "--model=m"], "--model is for servers that are started for the run, and all targets are up"),
        (["kv", *UP, "--dtype=float32"], "--dtype is for servers that are started for the run"),
        (["kv", *UP, "--kv=2x64"], "--kv is for servers that are started for the run"),
        (["resume-latency", *UP, "--model=/nowhere"], "no model in /nowhere"),
        (["resume-latency", *UP, "--model=/nowhere", "--kv=2x64"], "--kv is for servers that are started"),
    ],
)
def test_servers_that_cannot_be_measured_are_told_before_any_is_started(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would else be found out when the targets before them have been measured, which can take an hour."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where nothing is installed
    assert main([*arguments, "--output", str(tmp_path / "results")]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("results/*"))


def read(*arguments: str) -> Workload | Replay:
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    return read_workload(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ([], {}),
        (["--agents", "80", "--rate", "inf"], {"agents": 80, "rate": float("inf")}),
        (["--arrivals", "gamma", "--burstiness", "0.5"], {"arrivals": Arrivals.GAMMA, "burstiness": 0.5}),
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
        (["--think", "5:15", "--burstiness", "1"], "--burstiness, --think"),
        (["--eta-noise", "0", "--tool-share", "0"], "--eta-noise, --tool-share"),
    ],
)
def test_what_a_trace_decides_is_refused_even_where_it_is_the_default(arguments: list[str], named: str) -> None:
    with pytest.raises(LoadgenError, match=f"^leave out {named}: --trace decides it"):
        read("--trace", "a.jsonl", *arguments)


SERVER = Server("a", "http://127.0.0.1:1", "djinn", None)


@dataclass
class Seen:
    interrupted: bool


@dataclass(frozen=True)
class One:
    """What was seen of a target, and whether it was as it should be."""

    findings: Seen
    succeeded: bool
    server: Server = SERVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums(PerTarget, Result):
    experiment: Literal["sums"] = "sums"
    targets: tuple[One, ...]


GOOD, BAD, ENDED = One(Seen(False), True), One(Seen(False), False), One(Seen(True), False)


@pytest.mark.parametrize(
    ("targets", "code"), [((), 0), ((GOOD, GOOD), 0), ((GOOD, BAD), 1), ((BAD, ENDED), 130), ((ENDED, GOOD), 130)]
)
def test_the_exit_code_is_that_of_the_worst_target(targets: tuple[One, ...], code: int) -> None:
    assert finish(Sums(seed=0, targets=targets), "figures", list) == code


def test_figures_are_shown_also_where_no_file_can_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> Sequence[Path]:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        finish(Sums(seed=0, targets=()), "figures", write)
    assert "figures" in capsys.readouterr().out
