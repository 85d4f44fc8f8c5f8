"""All files of a run: the result, the page, and every turn as CSV."""

import csv
from collections.abc import Iterator
from pathlib import Path

from loadgen.experiments.density.curves import PARTS
from loadgen.experiments.density.page import make_page
from loadgen.experiments.density.report import DensityReport
from loadgen.load.records import Failure, Run, TurnRecord
from loadgen.load.trace import Trace, write_trace
from loadgen.results.files import result_path
from loadgen.results.page import write_outputs
from loadgen.stats.tokens import recomputed_tokens

COLUMNS = (
    *("target", "repeat", "agent", "turn", "tool", "due_s", "sent_s", "ttft_s", "tpot_s", "latency_s"),
    *(f"{part}_ms" for part in PARTS),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "recomputed_tokens", "failed_s", "error", "message"),
)
"""Times as in `TurnRecord`; the last three are of turns that failed. What is not known is empty."""


def write_csv(report: DensityReport, path: Path) -> Path:
    """Write a new file with a header and a line per turn that ran, repeats and targets in order; returns `path`.

    Raises OSError.
    """
    with path.open("x", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for target in report.targets:
            for repeat, run in enumerate(target.runs):
                place = {"target": target.server.name, "repeat": repeat}
                writer.writerows(place | line for line in _lines(run))
    return path


def _lines(run: Run) -> Iterator[dict[str, object]]:
    recomputed = recomputed_tokens(run.turns)
    for record in run.turns:
        yield _completed(record) | {"recomputed_tokens": recomputed[record.agent, record.turn]}
    yield from (_failed(failure) for failure in run.failures if failure.turn is not None)


def _completed(record: TurnRecord) -> dict[str, object]:
    cost, parts = record.cost, record.cost.resume_ms or {}
    return {
        "agent": record.agent,
        "turn": record.turn,
        "tool": int(record.tool),
        "due_s": record.due_s,
        "sent_s": record.sent_s,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "latency_s": record.latency_s,
        **{f"{part}_ms": parts.get(part) for part in PARTS},
        "prompt_tokens": cost.prompt_tokens,
        "completion_tokens": cost.completion_tokens,
        "cached_tokens": cost.cached_tokens,
    }


def _failed(failure: Failure) -> dict[str, object]:
    return {
        "agent": failure.agent,
        "turn": failure.turn,
        "failed_s": failure.at_s,
        "error": failure.kind,
        "message": failure.message,
    }


def write_density(report: DensityReport, trace: Trace, folder: Path) -> list[Path]:
    """Write density-TIME.json, .html, .csv and -FIGURE.png, and trace-TIME.jsonl, with which it can be run again.

    Returns their paths. Raises OSError, and `LoadgenError` if the trace cannot be written.
    """
    written = write_outputs(report, make_page(report), folder)
    lines = write_csv(report, written[0].with_suffix(".csv"))
    replay = result_path(folder, "trace", report.started_at, "jsonl")
    write_trace(trace, replay)
    return [*written, lines, replay]
