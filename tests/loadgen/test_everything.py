"""Every experiment in one go: what is run, and the page that leads to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadgen.cli import main, make_parser
from loadgen.everything.index import Outcome, write_index
from loadgen.everything.stages import STAGES, Stage


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "density,speed"], "there is no experiment 'speed' for --only, only density, capacity,"),
        (["--rivals", "vllm,nobody"], "there is no peer 'nobody'"),
    ],
)
def test_an_unknown_experiment_or_rival_is_refused(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["all", *arguments, "--output", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


def test_the_index_shows_the_first_figures_of_a_report_and_leads_to_it(tmp_path: Path) -> None:
    page = tmp_path / "kv-1.html"
    page.touch()
    for name in ("kv-1-b.png", "kv-1-a.png", "kv-1-c.png", "kv-2-a.png"):
        (tmp_path / name).touch()
    stage = Stage("kv", "How <large>?", full="", quick="")
    outcomes = [Outcome(stage, 0, 61.0, page), Outcome(stage, -9, 1.0, None)]
    text = write_index(outcomes, ["python", "-m", "loadgen", "all"], tmp_path).read_text()
    assert 'href="kv-1.html"' in text
    assert text.count("<img") == 2
    assert "kv-2-a.png" not in text
    assert "How &lt;large&gt;?" in text
    assert "all went well, 1:01" in text
    assert "broke off with exit code -9" in text
