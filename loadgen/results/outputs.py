"""All files of a report at once."""

from __future__ import annotations

from pathlib import Path

from loadgen.results.files import Result, result_path, write_result
from loadgen.results.page import Page, write_page, write_pictures


def write_outputs(report: Result, page: Page, folder: Path) -> list[Path]:
    """Write EXPERIMENT-TIME.json, .html and -FIGURE.png to `folder`; returns their paths. Raises OSError.

    The JSON comes first: everything else can be made from it again.
    """
    data = write_result(report, result_path(folder, report.experiment, report.started_at, "json"))
    html = write_page(page, data.with_suffix(".html"))
    return [data, html, *write_pictures(page, html)]
