"""A report as one HTML file that needs nothing else: figures as SVG in it, readable on a phone, light and dark."""

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader

from loadgen.results.figures import Figure, to_png, to_svg
from loadgen.results.files import Result, result_path, write_result
from loadgen.results.tables import TextTable


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what is below it, in this order; an empty `title` is no heading."""

    title: str
    text: str = ""
    figures: tuple[Figure, ...] = ()
    tables: tuple[TextTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report. `lead` are the paragraphs that come first: what was done, and on what; then comes the command."""

    title: str
    lead: tuple[str, ...]
    sections: tuple[Section, ...]
    command: tuple[str, ...] = ()

    @property
    def figures(self) -> Iterator[Figure]:
        """All figures, in order."""
        return (figure for section in self.sections for figure in section.figures)


def write_page(page: Page, path: Path) -> Path:
    """Write the page to a new file; returns `path`. Raises OSError, FileExistsError if the file is there already."""
    environment = Environment(
        loader=PackageLoader("loadgen.results"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    numbers = iter(range(sum(1 for _ in page.figures)))
    text = environment.get_template("page.html").render(
        page=page, command=shlex.join(page.command), draw=lambda figure: to_svg(figure, f"figure-{next(numbers)}")
    )
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return path


def write_pictures(page: Page, path: Path) -> list[Path]:
    """Write each figure beside the page of that `path`, as PAGE-FIGURE.png; returns their paths. Raises OSError."""
    written: list[Path] = []
    seen: Counter[str] = Counter()
    for figure in page.figures:
        seen[figure.slug] += 1
        again = f"-{seen[figure.slug]}" if seen[figure.slug] > 1 else ""
        written.append(path.with_name(f"{path.stem}-{figure.slug}{again}.png"))
        to_png(figure, written[-1])
    return written


def write_outputs(report: Result, page: Page, folder: Path) -> list[Path]:
    """Write EXPERIMENT-TIME.json, .html and -FIGURE.png to `folder`; returns their paths. Raises OSError.

    The JSON comes first: everything else can be made from it again.
    """
    data = write_result(report, result_path(folder, report.experiment, report.started_at, "json"))
    html = write_page(page, data.with_suffix(".html"))
    return [data, html, *write_pictures(page, html)]
