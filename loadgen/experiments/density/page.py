"""The report as a page, and several reports as one."""

from collections.abc import Iterator, Sequence

from loadgen.experiments.density.figures import figures
from loadgen.experiments.density.report import DensityReport, Named, of_report, of_reports
from loadgen.experiments.density.tables import server_table, tables
from loadgen.load.arrivals import Arrivals
from loadgen.load.workload import Replay, Signals, Workload
from loadgen.results.page import Page, Section

TITLE = "Density: agents that generate, think and come back"


def make_page(report: DensityReport) -> Page:
    """All that there is to see of one run."""
    return Page(TITLE, _about(report), _sections(of_report(report)), report.command)


def make_comparison(files: Sequence[str], reports: Sequence[DensityReport]) -> Page:
    """Runs side by side, of files of these names."""
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
        _load(report.workload),
        f"{measured.repeats} {'repeat' if measured.repeats == 1 else 'repeats'}, warm-up of {measured.warmup_s:g} s"
        + (f"; a turn is good with {slo}." if slo else "."),
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}; seed {report.seed}.",
    )


def _load(load: Workload | Replay) -> str:
    """The load in a sentence."""
    scale = "" if load.time_scale == 1 else f" All times multiplied by {load.time_scale:g}."
    if isinstance(load, Replay):
        return f"The agents of {load.trace.name}, {load.system_tokens} tokens shared; signals: {load.signals}.{scale}"
    return (
        f"{load.agents} agents, {load.rate:g} a second ({_arrivals(load)}), {load.turns} turns each: a prompt of "
        f"{load.context} tokens ({load.system_tokens} shared), {load.resume_tokens} more in each later turn, "
        f"{load.completion_tokens} generated; seconds of thinking in between: {load.think}{_tools(load)}; "
        f"signals: {_signals(load)}.{scale}"
    )


def _arrivals(load: Workload) -> str:
    return f"gamma, burstiness {load.burstiness:g}" if load.arrivals is Arrivals.GAMMA else load.arrivals


def _signals(load: Workload) -> str:
    """How well the agents know when they come back is a part of what is measured."""
    if load.signals is not Signals.ETA:
        return load.signals
    return f"eta, off by a lognormal factor of sigma {load.eta_noise:g}" if load.eta_noise else "eta, exact"


def _tools(load: Workload) -> str:
    if not load.tool_share:
        return ""
    return f", after the {load.tool_share:.0%} of turns that call a tool: {load.tool_think}"
