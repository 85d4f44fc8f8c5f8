"""`python -m loadgen report`: results of density once more, one or several side by side."""

import argparse
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from loadgen.experiments.density.page import differences, make_comparison, make_page
from loadgen.experiments.density.report import DensityReport, of_reports
from loadgen.experiments.density.tables import tables
from loadgen.options.common import EXIT_OK, make_output
from loadgen.results.files import read_result, result_path
from loadgen.results.page import write_page, write_pictures
from loadgen.results.tables import to_rich


def add_options(parser: argparse.ArgumentParser) -> None:
    """The files, and where the page goes."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="density-TIME.json; several are compared")
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), metavar="DIR", help="folder for the page (default: runs)"
    )


def run(options: argparse.Namespace, progress: Console) -> int:
    """Print the tables, and write the page with its figures; returns the exit code. Raises `LoadgenError`."""
    reports = [read_result(path, DensityReport) for path in options.files]
    files = [path.name for path in options.files]
    folder = make_output(options)
    output = Console(highlight=False)
    if len(reports) == 1:
        page = make_page(*reports)
    else:
        page = make_comparison(files, reports)
        for number, file in enumerate(files, 1):
            output.print(f"({number}) {file}", markup=False, soft_wrap=True)
    for sentence in differences(reports):
        progress.print(sentence, markup=False)
    output.print(to_rich(tables(of_reports(reports))))
    path = write_page(page, result_path(folder, "report", datetime.now(UTC), "html"))
    for written in (path, *write_pictures(page, path)):
        output.print(f"written: {written}", markup=False, soft_wrap=True)
    return EXIT_OK
