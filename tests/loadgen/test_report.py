"""`loadgen report` shows results again, alone and beside each other, and refuses what is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.results.files import write_result
from tests.loadgen.experiments.density.building import report


def result(path: Path, ttfts_s: Mapping[str, float]) -> str:
    return str(write_result(report(ttfts_s, repeats=1), path))


def test_one_result_has_its_page_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = result(tmp_path / "a.json", {"djinn": 0.1, "vllm": 2.0})
    assert main(["report", file, "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert "Side by side" in shown.out
    assert shown.err == ""
    (page,) = (tmp_path / "out").glob("report-*.html")
    assert "agents that generate" in page.read_text("utf-8")
    assert str(page) in shown.out
    assert len(list((tmp_path / "out").glob("report-*.png"))) == 6


def test_two_results_are_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [result(tmp_path / f"{name}.json", {"djinn": ttft}) for name, ttft in (("old", 0.2), ("new", 0.1))]
    assert main(["report", *files, "--output", str(tmp_path)]) == 0
    (page,) = tmp_path.glob("report-*.html")
    text = page.read_text("utf-8")
    assert "runs compared" in text
    assert "(0.5×)" in text
    shown = capsys.readouterr().out
    assert "(1) old.json" in shown
    assert "djinn (2)" in shown


def test_results_that_cannot_share_a_page_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = report({"djinn": 0.1}, repeats=1)
    write_result(made, Path("a.json"))
    wide = replace(made.machine, flags=("avx2", "avx512f", "amx_bf16"))
    write_result(replace(made, machine=wide), Path("wide.json"))
    Path("other.json").write_text('{"experiment": "kv"}')
    for files, message in (
        (["nowhere.json"], "cannot read nowhere.json"),
        (["other.json"], "other.json is not a result of density, but of kv"),
        (["a.json", "other.json"], "other.json is not a result of density"),
        (["a.json", "wide.json"], "different processors (avx2 avx512f; avx2 avx512f amx_bf16): make a page of each"),
    ):
        assert main(["report", *files, "--output", "out"]) == 2
        assert message in capsys.readouterr().err
        assert not list(tmp_path.glob("out/*"))
