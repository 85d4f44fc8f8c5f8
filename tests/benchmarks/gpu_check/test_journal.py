"""What is left of a stage that was ended, and how its figures are judged."""

from io import StringIO
from pathlib import Path

from benchmarks.figures import Target
from benchmarks.gpu_check.reports.journal import Journal, Outcome, StageRecord, read_journal


def write(path: Path, *, has_targets: bool = True, end: Outcome | None = Outcome.DONE) -> None:
    file = StringIO()
    journal = Journal(file, has_targets=has_targets)
    journal.fact("device", "a card")
    journal.value("swap", "×", 0.85, Target(0.9, at_least=True))
    journal.value("errors", "", 0.0, Target(0.0))
    journal.point("chart", "line", 1.0, 2.0)
    journal.samples("swap", [0.8, 0.9])
    if end is not None:
        journal.end(end, "why")
    path.write_text(file.getvalue())


def read(path: Path) -> StageRecord:
    record = StageRecord("swap", "Swap")
    read_journal(path, record)
    return record


def test_everything_comes_back_and_a_missed_target_is_seen(tmp_path: Path) -> None:
    write(tmp_path / "journal")
    record = read(tmp_path / "journal")

    assert (record.outcome, record.reason) == (Outcome.DONE, "why")
    assert record.facts == {"device": "a card"}
    assert record.samples == {"swap": [0.8, 0.9]}
    assert [figure.label for figure in record.missed] == ["swap"]
    assert not record.is_well


def test_where_targets_do_not_apply_none_is_missed(tmp_path: Path) -> None:
    write(tmp_path / "journal", has_targets=False)
    assert read(tmp_path / "journal").is_well


def test_a_stage_that_was_ended_keeps_what_it_had_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, end=None)
    path.write_text(path.read_text() + '["figure", {"label": "ha')
    record = read(path)

    assert record.outcome is Outcome.OUT_OF_TIME
    assert len(record.figures) == 2


def test_a_stage_with_a_reason_not_to_run_is_well(tmp_path: Path) -> None:
    file = StringIO()
    Journal(file, has_targets=True).end(Outcome.SKIPPED, "not installed: fastapi")
    (tmp_path / "journal").write_text(file.getvalue())
    assert read(tmp_path / "journal").is_well
