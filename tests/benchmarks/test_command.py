"""What is written of a run of a benchmark of Djinn alone."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.breakpoints.__main__ import BENCHMARK as BREAKPOINTS
from benchmarks.command import Benchmark
from benchmarks.figures import figure_table
from benchmarks.grammars.__main__ import BENCHMARK as GRAMMARS
from benchmarks.kv.__main__ import BENCHMARK as KV
from loadgen.processes.launch import ROOT
from tests.benchmarks.breakpoints.test_figures import MEASURED as PAUSES
from tests.benchmarks.grammars.test_figures import MEASURED as STEPS
from tests.benchmarks.kv.test_figures import MEASURED as MOVES

MODEL = Path("/home/me/models/smollm2")


@pytest.mark.parametrize(("benchmark", "measured"), [(BREAKPOINTS, PAUSES), (GRAMMARS, STEPS), (KV, MOVES)])
def test_the_files_hold_every_figure_and_tell_nothing_about_folders(
    benchmark: Benchmark[Any, Any], measured: Any, tmp_path: Path
) -> None:
    run = benchmark.describe(MODEL, benchmark.quick, measured)

    markdown = benchmark.write(tmp_path, run, benchmark.quick)

    text, written = markdown.read_text(), markdown.with_suffix(".json").read_text()
    assert markdown.name.startswith(f"{benchmark.name}-")
    assert all(" | ".join(row) in text for row in figure_table("", run.figures).rows)
    assert len(orjson.loads(written)["figures"]) == len(run.figures)
    assert orjson.loads(written)["model"] == "smollm2"
    assert "/home/me" not in text + written
    assert str(ROOT) not in text + written


def test_the_files_hold_every_raw_value(tmp_path: Path) -> None:
    moves = KV.write(tmp_path, KV.describe(MODEL, KV.quick, MOVES), KV.quick)
    pauses = BREAKPOINTS.write(tmp_path, BREAKPOINTS.describe(MODEL, BREAKPOINTS.quick, PAUSES), BREAKPOINTS.quick)

    of_moves, of_pauses = (orjson.loads(path.with_suffix(".json").read_bytes())["measured"] for path in (moves, pauses))
    assert of_moves["resumes"][1]["cold"] == {"first_token_s": 0.23, "restore_s": 0.01}
    assert of_moves["parks"][1]["second_bytes"] == 8
    assert of_pauses["rounds"][1]["rates"]["steered"] == 50.0
    assert of_pauses["decode_pauses"][2]["restore_s"] == 0.01
