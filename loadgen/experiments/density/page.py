"""The report as a page, and several reports as one."""

from collections.abc import Iterator, Sequence

from loadgen.experiments.density.figures import figures
from loadgen.experiments.density.report import DensityReport, Named, of_report, of_reports
from loadgen.experiments.density.tables import server_table, tables
from loadgen.load.describing import load_in_words
from loadgen.results.origin import require_same_flags
from loadgen.results.page import Page, Section

TITLE = "Density: agents that generate, think and come back"


def make_page(report: DensityReport) -> Page:
    """All that there is to see of one run."""
    return Page(TITLE, _about(report), _sections(of_report(report)), report.command)


def make_comparison(files: Sequence[str], reports: Sequence[DensityReport]) -> Page:
    """Runs side by side, of files of these names.

    Raises `DifferentProcessors` if two of them come from processors with different flags.
    """
    require_same_flags([(file, report.machine) for file, report in zip(files, reports, strict=True)])
    lead = tuple(
        f"({number}) {file}: {' '.join(_about(report))}"
        for number, (file, report) in enumerate(zip(files, reports, strict=True), 1)
    )
    return Page("Density: runs compared", (*lead, *differences(reports)), _sections(of_reports(reports)))


def differences(reports: Sequence[DensityReport]) -> Iterator[str]:
    """What keeps the runs from being comparable, a sentence for each."""
    for what, found in (
        ("traces", {report.trace_sha256 for report in reports}),
        ("texts", {report.texts.sha256 for report in reports}),
        ("ways of measuring", {str(report.measurement) for report in reports}),
        ("machines", {str(report.machine) for report in reports}),
    ):
        if len(found) > 1:
            yield f"The runs had different {what}: not every difference between them is one of the servers."


def _sections(targets: tuple[Named, ...]) -> tuple[Section, ...]:
    first, *rest = tables(targets)
    return (
        Section("", tables=(first,)),
        Section("Figures", figures=figures(targets)),
        Section("Tables", tables=tuple(rest)),
        Section("Servers", tables=(server_table(targets),)),
    )


def _about(report: DensityReport) -> tuple[str, ...]:
    measured = report.measurement
    limits = {"TTFT": measured.slo.ttft_s, "time per output token": measured.slo.tpot_s}
    slo = " and ".join(f"{what} within {1000 * limit:g} ms" for what, limit in limits.items() if limit is not None)
    return (
        load_in_words(report.workload),
        f"{measured.repeats} {'repeat' if measured.repeats == 1 else 'repeats'}, warm-up of {measured.warmup_s:g} s"
        + (f"; a turn is good with {slo}." if slo else "."),
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}; seed {report.seed}.",
    )
