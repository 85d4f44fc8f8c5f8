"""`python -m loadgen report`: results once more, one or several of the same experiment side by side."""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from loadgen.errors import LoadgenError
from loadgen.options.common import EXIT_OK, make_output
from loadgen.report.page import compared, differences, shown_tables, write_page, write_pictures
from loadgen.report.report import read_report, result_path, schema_text
from loadgen.report.tables import to_rich


def add_options(parser: argparse.ArgumentParser) -> None:
    """The files, and where the page goes."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="EXPERIMENT-TIME.json; several to compare")
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), metavar="DIR", help="folder for the page (default: runs)"
    )


def run(options: argparse.Namespace, progress: Console) -> int:
    """Print the tables, and write the page with its charts; returns the exit code. Raises `LoadgenError`."""
    reports = [read_report(path) for path in options.files]
    for path, each in zip(options.files, reports, strict=True):
        if each.experiment != reports[0].experiment:
            raise LoadgenError(f"{path} is a result of {each.experiment}, not {reports[0].experiment} like the first")
    folder = make_output(options)
    output = Console(highlight=False)
    report, files = reports[0], [path.name for path in options.files]
    if len(reports) > 1:
        report = compared(files, reports)
        for number, file in enumerate(files, 1):
            output.print(f"({number}) {file}", markup=False, soft_wrap=True)
    for sentence in differences(reports):
        progress.print(sentence, markup=False)
    output.print(to_rich(shown_tables(report)))
    page = write_page(report, result_path(folder, "report", datetime.now(UTC), "html"))
    for written in (page, *write_pictures(report, page)):
        output.print(f"written: {written}", markup=False, soft_wrap=True)
    return EXIT_OK


class Schema:
    """`python -m loadgen schema`: the form of a result file, published as docs/schemas/result.json."""

    def add_options(self, _parser: argparse.ArgumentParser) -> None:
        """None: all experiments write the same."""

    def run(self, _options: argparse.Namespace, _progress: Console) -> int:
        """Print the schema; returns the exit code."""
        sys.stdout.write(schema_text())
        return EXIT_OK
