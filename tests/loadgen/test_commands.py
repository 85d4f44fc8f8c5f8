"""The command line of the load generator: what is written about it, what it refuses, and all experiments in one go."""

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from docs.site.loadgen_page import loadgen_page
from loadgen.cli import COMMANDS, main, make_parser
from loadgen.everything import STAGES, Stage
from loadgen.experiments.density.rows import LATENCIES
from loadgen.targets.djinn import HISTOGRAMS

DOCS = Path(__file__).parents[2] / "docs"
FLAG = r"--[a-z][a-z-]*"


# What is written about it.


def test_the_page_has_every_option_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = loadgen_page()
    for command in [[name] for name in COMMANDS] + [["peers", "start"]]:
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        [section] = re.findall(rf"^## `{command[0]}`$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        told = set(re.findall(rf"^  ({FLAG})", capsys.readouterr().out, re.MULTILINE))
        assert told <= set(re.findall(rf"`({FLAG})`", section))


def test_every_command_figure_and_histogram_is_documented() -> None:
    guide, reference = ((DOCS / name).read_text("utf-8") for name in ("loadgen.md", "reference/experiments.md"))
    assert {name for name in COMMANDS if f" -m loadgen {name}" not in guide} == set()
    assert all(label.partition(" of ")[0] in reference for label in LATENCIES)
    assert set(HISTOGRAMS) == set(re.findall(r"djinn_\w+_seconds", reference))


def test_results_have_a_published_schema_which_a_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    published = (DOCS / "schemas/result.json").read_text("utf-8")
    assert published == capsys.readouterr().out
    Draft202012Validator.check_schema(json.loads(published))


# Mistakes.

UP = ("--target", "up=http://127.0.0.1:9")
OF_DENSITY = "See python -m loadgen density --help\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("density", *UP, "--agent", "3"), f"unknown flag --agent; did you mean --agents? {OF_DENSITY}"),
        (("density",), f"missing --target. {OF_DENSITY}"),
        (("density", *UP, "--agents", "many"), f"--agents takes an integer, not 'many'. {OF_DENSITY}"),
        (("density", "--target"), f"--target takes a value: TARGET. {OF_DENSITY}"),
        (
            ("density", "--target", "a=127.0.0.1:80"),
            "the URL of a target begins with http://: --target a=http://127.0.0.1:80\n",
        ),
        (
            ("peers", "start", "tgi"),
            "there is no peer 'tgi', only djinn, djinn+lru, djinn+none, djinn+tools, djinn+tools+signals, vllm, "
            "vllm+offload, llamacpp, transformers\n",
        ),
        (("selfcheck", "--gap", "0"), "--gap must be above 0\n"),
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
        (["density", *UP, "--target", "vllm"], "vllm is not installed: python -m loadgen peers install vllm"),
        (["kv", *UP, "--model=m"], "--model is for servers that are started for the run, and all targets are up"),
        (["kv", "--target=djinn", "--model=/nowhere"], "no model in /nowhere"),
        (["kv", *UP, "--kv=2x64"], "--kv is for servers that are started"),
        (["all", "--only", "density,speed"], "there is no experiment 'speed' for --only, only density, capacity,"),
        (["all", "--rivals", "vllm,nobody"], "there is no peer 'nobody'"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_is_started(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would else be found out when the targets before it have been measured, which can take an hour."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where nothing is installed
    monkeypatch.delenv("DJINN_CACHE_DIR", raising=False)
    assert main([*arguments, "--output", str(tmp_path / "results")]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("results/*"))


# Every experiment in one go.


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.experiment)
def test_every_stage_is_a_command_that_there_is(stage: Stage) -> None:
    for quick in (True, False):
        options = make_parser().parse_args(stage.arguments(["vllm", "llamacpp"], quick=quick))
        targets = getattr(options, "target", [])
        assert (targets[-2:] == ["vllm", "llamacpp"]) is (stage.experiment in ("density", "capacity"))


def test_a_stage_that_cannot_run_does_not_keep_the_next_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is no model in an empty cache, and no peer."""
    monkeypatch.setenv("DJINN_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["all", "--quick", "--only", "capacity,kv", "--output", str(tmp_path / "out")]) == 1
    shown = capfd.readouterr()
    assert shown.err.count("no model in") == 2
    assert re.search(r"^capacity: could not run, .*\nkv: could not run, ", shown.out, re.MULTILINE)
    for name in ("vllm", "llamacpp"):
        assert f"{name} takes no part: it is not installed; python -m loadgen peers install {name}" in shown.err
    index = (tmp_path / "out/index.html").read_text()
    assert all((stage.question in index) is (stage.experiment in ("capacity", "kv")) for stage in STAGES)


# The load generator against a server whose delays are known.

SMALL = ("--agents", "10", "--tokens", "3")


@pytest.mark.long
def test_delays_are_seen_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    """They are so long that a figure which leaves one out, or begins at the wrong event, is off by more.

    The bound is that of a machine on which other things run; `python -m loadgen selfcheck` holds a strict one.
    """
    assert main(["selfcheck", *SMALL, "--ttft", "0.6", "--gap", "0.4", "--tolerance", "0.3"]) == 0
    output = capsys.readouterr().out
    assert "20 turns, 0 failures" in output
    assert "within 300 ms" in output


def test_what_is_off_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """No figure is exact to a nanosecond."""
    assert main(["selfcheck", *SMALL, "--ttft", "0.01", "--gap", "0.01", "--tolerance", "1e-9"]) == 1
    assert "NOT within" in capsys.readouterr().out
