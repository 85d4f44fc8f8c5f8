"""What is written of a run."""

from pathlib import Path

import orjson

from benchmarks.figures import figure_table
from benchmarks.kv.plan import QUICK
from benchmarks.kv.record import TITLE, describe_run, write_run
from tests.benchmarks.kv.test_figures import MEASURED


def test_the_files_hold_every_figure_and_every_raw_value(tmp_path: Path) -> None:
    run = describe_run(Path("/home/me/models/smollm2"), QUICK, [0, 1], MEASURED)

    markdown = write_run(tmp_path, run)

    written = orjson.loads(markdown.with_suffix(".json").read_bytes())
    assert markdown.name.startswith("kv-")
    assert all(" | ".join(row) in markdown.read_text() for row in figure_table(TITLE, run.figures).rows)
    assert len(written["figures"]) == len(run.figures)
    assert written["measured"]["resumes"][1]["cold"] == {"first_token_s": 0.23, "restore_s": 0.01}
    assert written["measured"]["parks"][1]["second_bytes"] == 8


def test_the_files_tell_nothing_about_folders(tmp_path: Path) -> None:
    run = describe_run(Path("/home/me/models/smollm2"), QUICK, [0, 1], MEASURED)

    written = write_run(tmp_path, run).with_suffix(".json").read_text()

    assert "/home/me" not in written
    assert str(Path(__file__).parents[3]) not in written
