"""What is written of a run."""

from pathlib import Path

import orjson

from benchmarks.breakpoints.plan import QUICK
from benchmarks.breakpoints.record import TITLE, describe_run, write_run
from benchmarks.figures import figure_table
from tests.benchmarks.breakpoints.test_figures import MEASURED


def test_the_files_hold_every_figure_and_every_raw_value(tmp_path: Path) -> None:
    run = describe_run(Path("/home/me/models/smollm2"), QUICK, [0, 1], MEASURED)

    markdown = write_run(tmp_path, run)

    written = orjson.loads(markdown.with_suffix(".json").read_bytes())
    assert markdown.name.startswith("breakpoints-")
    assert all(" | ".join(row) in markdown.read_text() for row in figure_table(TITLE, run.figures).rows)
    assert written["model"] == "smollm2"
    assert "/home/me" not in markdown.with_suffix(".json").read_text()
    assert len(written["figures"]) == len(run.figures)
    assert written["measured"]["rounds"][1]["steered"] == 50.0
    assert written["measured"]["decode_pauses"][2]["restore_s"] == 0.01
