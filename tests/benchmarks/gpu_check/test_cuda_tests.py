"""What the stage that runs the CUDA tests makes of pytest's answer."""

import io
import time
from pathlib import Path

import pytest

from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.plan import FULL
from benchmarks.gpu_check.reports.journal import Journal, StageRecord, read_journal
from benchmarks.gpu_check.stages import cuda_tests
from loadgen.errors import NotAsMeant

TESTS = f"""
import pytest
pytestmark = pytest.{cuda_tests.MARK}
def test_right(): pass
def test_wrong(): assert 1 == 2
def test_elsewhere(): pytest.skip("no")
"""


def test_each_end_is_counted_and_failures_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda: needs one\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    file = io.StringIO()
    context = StageContext(FULL, Journal(file, has_targets=True), time.monotonic() + 60, tmp_path)

    cuda_tests.report(context, cuda_tests.run_tests(["test_some.py"], tmp_path, 60))

    (tmp_path / "journal").write_text(file.getvalue())
    record = StageRecord("cuda_tests", "CUDA tests")
    read_journal(tmp_path / "journal", record)
    assert [figure.spread.median for figure in record.figures] == [1, 1, 1]
    assert record.notes == ["Failed: test_some::test_wrong"]
    assert not record.is_well


def test_tests_that_take_too_long_are_a_failure(tmp_path: Path) -> None:
    with pytest.raises(NotAsMeant, match="longer"):
        cuda_tests.run_tests(["test_some.py"], tmp_path, 0.01)
