"""Every stage of the GPU check on a CPU, from the command line's options to the files."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.gpu_check.program import run_check, write_page_of
from benchmarks.gpu_check.reports.journal import Outcome, StageRecord
from benchmarks.gpu_check.reports.record import Run, read_run
from benchmarks.gpu_check.stage_list import STAGES

ENGINE_STAGES = [stage.name for stage in STAGES if stage.name != "cuda_tests"]


def check(folder: Path, *stages: str, profile: tuple[str, ...] = ()) -> Run:
    """A run of these stages, read back from its file."""
    options = Namespace(tiny=True, only=list(stages), profile=list(profile), output=folder, time_limit=280.0)
    assert run_check(options)
    (data,) = folder.glob("gpu-check-*.json")
    return read_run(data)


def median_of(record: StageRecord, label: str) -> float:
    (figure,) = [figure for figure in record.figures if figure.label == label]
    return figure.spread.median


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_stage_runs_on_a_cpu(tmp_path: Path) -> None:
    run = check(tmp_path, *ENGINE_STAGES)

    found = {record.name: record for record in run.stages}
    assert {name: (record.outcome, record.reason) for name, record in found.items()} == dict.fromkeys(
        ENGINE_STAGES, (Outcome.DONE, "")
    )
    assert all(record.figures or record.name == "doctor" for record in run.stages)
    assert found["doctor"].facts
    assert median_of(found["sessions"], "Sessions that ended / begun") == 1
    assert median_of(found["sessions"], "Tokens computed again") == 0
    assert median_of(found["density"], "Turns that completed / planned") == 1
    assert median_of(found["density"], "Errors") == 0
    assert len(found["decode"].samples) == 4, "Djinn and Transformers, at two batches"
    assert {point.series for point in found["weights"].points} == {"Djinn", "Accelerate"}
    assert {point.series for point in found["resume"].points} == {"computed again", "hand-written offload", "Djinn"}

    (page,) = tmp_path.glob("gpu-check-*.html")
    assert page.read_text().count("<svg") == 4
    (text,) = tmp_path.glob("gpu-check-*.md")
    assert all(record.title in text.read_text() for record in run.stages)


def test_a_profile_that_is_asked_for_is_written(tmp_path: Path) -> None:
    check(tmp_path, "swap", profile=("decode",))

    (table,) = tmp_path.glob("gpu-check-*-decode.txt")
    assert "Self CPU" in table.read_text()
    assert list(tmp_path.glob("gpu-check-*-decode.json.gz"))


def test_the_record_says_what_was_run_and_a_page_can_be_drawn_later(tmp_path: Path) -> None:
    run = check(tmp_path, "copies")
    assert run.device.name
    assert run.versions["torch"]
    assert run.plan["name"] == "tiny"

    (data,), (page,) = tmp_path.glob("gpu-check-*.json"), tmp_path.glob("gpu-check-*.html")
    before = page.read_text()
    page.unlink()

    assert write_page_of(data) == 0
    assert page.read_text() == before


def test_a_stage_that_there_is_not_is_refused_before_anything_runs(tmp_path: Path) -> None:
    options = Namespace(tiny=True, only=["decoed"], profile=[], output=tmp_path, time_limit=10.0)
    with pytest.raises(SystemExit, match="decoed"):
        run_check(options)
    assert not list(tmp_path.iterdir())


def test_where_there_is_no_gpu_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = Namespace(tiny=False, only=[], profile=[], output=tmp_path / "results", time_limit=280.0)
    with pytest.raises(SystemExit, match="no CUDA device"):
        run_check(options)
    assert not options.output.exists()
