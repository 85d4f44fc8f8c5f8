"""The report as a page and for the terminal."""

from collections.abc import Callable, Iterator

from matplotlib.axes import Axes

from loadgen.experiments.migrate.report import Cost, MigrateReport
from loadgen.results.failures import failure_table
from loadgen.results.figures import Figure
from loadgen.results.page import Page, Section
from loadgen.results.plots import Series, bars, lines
from loadgen.results.tables import Mark, TextTable
from loadgen.results.text import in_bytes

EQUAL, DIFFERENT = "equal", "DIFFERENT"


def make_page(report: MigrateReport) -> Page:
    """All that there is to see of a run."""
    plan, origin, goal = report.plan, report.origin, report.goal
    lead = (
        f"Sessions are computed on {origin.name}, exported, imported on {goal.name}, and go on there with "
        f"{plan.new_tokens} more tokens of text and {plan.decoded} generated ones, greedily; so they do on "
        f"{origin.name}, where they never moved. Each length {plan.repeats} times.",
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}.",
    )
    servers = "; ".join(f"{server.name}: {server.url} {server.started}".strip() for server in (origin, goal))
    sections = (Section("Servers", servers), *_sections(report))
    return Page("Sessions that move to another server", lead, sections, report.command)


def tables(report: MigrateReport) -> Iterator[TextTable]:
    """Every table that there is something to put in."""
    return (table for section in _sections(report) for table in section.tables)


def _sections(report: MigrateReport) -> Iterator[Section]:
    failures = failure_table(report.findings.failures, interrupted=report.findings.interrupted)
    if failures.rows:
        yield Section("Failures", tables=(failures,))
    if report.costs:
        yield Section("Answers", tables=(_answers(report),))
        yield Section("Cost", figures=(_whole(report), _parts(report)), tables=(_costs(report), _per_token(report)))


def _answers(report: MigrateReport) -> TextTable:
    rows = [
        (
            f"{cost.tokens:,}",
            f"{cost.equal} of {cost.moves}",
            f"{cost.same_tokens:,} of {cost.decoded_tokens:,}",
            f"{cost.computed_tokens:,}",
            EQUAL if cost.equal == cost.moves else DIFFERENT,
        )
        for cost in report.costs
    ]
    header = ("tokens", "sessions that said the same", "same tokens", "computed on arrival", "")
    note = (
        f"Same tokens: until the first that differs. Of what was computed on arrival, {report.plan.new_tokens} are the "
        "new text and one the last token that was generated before the move."
    )
    return TextTable("What they said after the move", header, rows, note, marks={EQUAL: Mark.GOOD, DIFFERENT: Mark.BAD})


def _costs(report: MigrateReport) -> TextTable:
    rows = [
        (
            f"{cost.tokens:,}",
            in_bytes(cost.file_bytes),
            *_ms(cost.export_s, cost.import_s, cost.first_token_s, cost.move_s, cost.anew_s),
            f"{cost.gain:.2f}x",
        )
        for cost in report.costs
    ]
    header = ("tokens", "file", "export", "import", "first token", "together", "computed from scratch", "faster by")
    note = (
        "Medians in milliseconds. The file goes through the load generator's disk. Computed from scratch: the first "
        "token of another history of that length, on the same server."
    )
    marks = {row[-1]: Mark.GOOD for row, cost in zip(rows, report.costs, strict=True) if cost.gain > 1}
    return TextTable("What a move costs, milliseconds", header, rows, note, marks=marks)


def _per_token(report: MigrateReport) -> TextTable:
    rows = [
        (
            f"{cost.tokens:,}",
            f"{cost.file_bytes / cost.tokens:,.0f}",
            *(
                f"{1e6 * seconds / cost.tokens:,.1f}"
                for seconds in (cost.export_s, cost.import_s, cost.first_token_s, cost.move_s, cost.anew_s)
            ),
        )
        for cost in report.costs
    ]
    header = ("tokens", "bytes", "export", "import", "first token", "together", "computed from scratch")
    return TextTable("The same for each token of the history, microseconds", header, rows)


def _whole(report: MigrateReport) -> Figure:
    def draw(axes: Axes) -> None:
        series = [
            Series("moved", [(cost.tokens, 1000 * cost.move_s) for cost in report.costs]),
            Series("computed from scratch", [(cost.tokens, 1000 * cost.anew_s) for cost in report.costs]),
        ]
        lines(axes, series, "tokens of history", "milliseconds", markers=True)

    caption = "Until the first token on the other server; medians."
    return Figure("Moving a session, or computing it from scratch", caption, draw)


def _parts(report: MigrateReport) -> Figure:
    def draw(axes: Axes) -> None:
        parts = {
            "export": _column(report.costs, lambda cost: cost.export_s),
            "import": _column(report.costs, lambda cost: cost.import_s),
            "first token": _column(report.costs, lambda cost: cost.first_token_s),
        }
        bars(axes, [f"{cost.tokens:,}" for cost in report.costs], parts, "milliseconds", stacked=True)
        axes.set_xlabel("tokens of history")

    return Figure("What a move is made of", "Medians of each part, on top of each other.", draw)


def _column(costs: tuple[Cost, ...], of: Callable[[Cost], float]) -> list[float | None]:
    return [1000 * of(cost) for cost in costs]


def _ms(*seconds: float) -> tuple[str, ...]:
    return tuple(f"{1000 * value:,.1f}" for value in seconds)
