"""Every experiment in one go: what is run, and the page that leads to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from loadgen.cli import main, make_parser
from loadgen.everything import command as everything
from loadgen.everything.index import Outcome, write_index
from loadgen.everything.stages import STAGES, Stage


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.experiment)
def test_every_stage_is_a_command_that_there_is(stage: Stage, quick: bool) -> None:
    options = make_parser().parse_args(stage.arguments(["vllm", "llamacpp"], quick=quick))

    targets = getattr(options, "target", [])
    assert (targets[-2:] == ["vllm", "llamacpp"]) is (stage.experiment in ("density", "capacity"))


def test_a_stage_that_cannot_run_does_not_keep_the_next_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stages = (
        Stage("density", "Does nobody answer?", full="--target nobody", quick=""),
        Stage("kv", "How large is KV?", full="--target nobody", quick=""),
    )
    monkeypatch.setattr(everything, "STAGES", stages)

    code = main(["all", "--rivals", "none", "--output", str(tmp_path)])

    assert code == 1
    shown = capfd.readouterr()
    assert "there is no peer 'nobody'" in shown.err
    assert "density: could not run" in shown.out
    assert "kv: could not run" in shown.out
    index = (tmp_path / "index.html").read_text()
    assert "Does nobody answer?" in index
    assert "How large is KV?" in index


def test_a_stage_that_is_killed_does_not_keep_the_next_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(everything, "STAGES", STAGES[:2])
    codes = iter([-9, 0])
    monkeypatch.setattr(everything, "_run_alone", lambda _arguments: next(codes))

    assert main(["all", "--quick", "--rivals", "none", "--output", str(tmp_path)]) == 1

    shown = capfd.readouterr().out
    assert "density: broke off with exit code -9" in shown
    assert "capacity: all went well" in shown


def test_only_some_stages_run_and_whoever_takes_no_part_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ran: list[Sequence[str]] = []

    def run(arguments: Sequence[str]) -> int:
        ran.append(arguments)
        return 0

    monkeypatch.setattr(everything, "_run_alone", run)
    monkeypatch.setenv("DJINN_CACHE_DIR", str(tmp_path / "cache"))  # where no peer is installed

    assert main(["all", "--quick", "--only", "capacity,kv", "--output", str(tmp_path)]) == 0

    assert [arguments[0] for arguments in ran] == ["capacity", "kv"]
    said = capfd.readouterr().err
    for name in ("vllm", "llamacpp"):
        assert f"{name} takes no part: it is not installed; python -m loadgen peers install {name}" in said


def test_an_unknown_experiment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["all", "--only", "density,speed", "--output", str(tmp_path)]) == 2
    assert "there is no experiment 'speed' for --only, only density, capacity," in capsys.readouterr().err


def test_an_unknown_rival_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["all", "--rivals", "vllm,nobody", "--output", str(tmp_path)]) == 2
    assert "there is no peer 'nobody'" in capsys.readouterr().err


def test_the_index_shows_the_first_figures_of_a_report_and_leads_to_it(tmp_path: Path) -> None:
    page = tmp_path / "kv-1.html"
    page.touch()
    for name in ("kv-1-b.png", "kv-1-a.png", "kv-1-c.png", "kv-2-a.png"):
        (tmp_path / name).touch()
    stage = Stage("kv", "How <large>?", full="", quick="")

    text = write_index([Outcome(stage, 0, 61.0, page)], ["python", "-m", "loadgen", "all"], tmp_path).read_text()

    assert 'href="kv-1.html"' in text
    assert text.count("<img") == 2
    assert "kv-2-a.png" not in text
    assert "How &lt;large&gt;?" in text
    assert "all went well, 1:01" in text
