"""The report as a page and for the terminal."""

from collections.abc import Iterator

from loadgen.experiments.kv.figures import fp8_figure, growth_figure, payoff_figures, transfer_figure
from loadgen.experiments.kv.report import KVReport, TargetReport
from loadgen.experiments.kv.structure import Structure
from loadgen.experiments.kv.tables import (
    codec_table,
    fp8_table,
    growth_table,
    payoff_tables,
    structure_table,
    transfer_table,
)
from loadgen.results.failures import failure_table
from loadgen.results.page import Page, Section
from loadgen.results.tables import TextTable


def make_page(report: KVReport) -> Page:
    """All that there is to see of a run."""
    plan = report.plan
    lead = (
        f"Sessions of {plan.tokens:,} tokens of real text ({report.texts.name}), everything {plan.repeats} times.",
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}.",
    )
    sections = tuple(section for target in report.targets for section in _sections(target))
    return Page("What a session's KV is, and what it costs to move", lead, sections, report.command)


def tables(target: TargetReport) -> Iterator[TextTable]:
    """Every table that there is something to put in."""
    return (table for section in _sections(target) for table in section.tables)


def _sections(target: TargetReport) -> Iterator[Section]:
    server, findings = target.server, target.findings
    started = server.started
    structure = () if findings.structure is None else (structure_table(findings.structure),)
    yield Section(f"{server.name}: {server.url}", started, tables=structure)
    failures = failure_table(findings.failures, interrupted=findings.interrupted)
    if failures.rows:
        yield Section("Failures", tables=(failures,))
    if findings.structure is not None:
        yield from _about_size(target, findings.structure)
    if findings.compressions:
        yield Section(
            "Compression",
            "Sizes and speeds of the codecs are measured: one exported session's KV, in this process. Lossless codecs "
            "gave back every byte. What that comes to on a link is calculated.",
            tuple(payoff_figures(findings)),
            (codec_table(findings), *payoff_tables(target)),
        )
    if findings.fp8_error is not None:
        figures, shown = (fp8_figure(findings.fp8_error),), (fp8_table(findings.fp8_error, findings.fp8_answers),)
        text = "E4M3 without a scale. On a GPU the cast would be done there, at another speed than here."
        yield Section("Eight bits", text, figures, shown)


def _about_size(target: TargetReport, structure: Structure) -> Iterator[Section]:
    text = "Calculated from the bytes of a block, and from the room that the server says it has."
    yield Section("Growth", text, (growth_figure(target, structure),), (growth_table(target, structure),))
    text = (
        "Speeds are nominal, or measured: between device, host and disk by the server's own clock, while one session "
        "was sent there; over TCP on the loopback interface from the first byte of the exported file until the "
        "receiver has the last. Times are calculated: bytes over speed."
    )
    yield Section("Transfer", text, (transfer_figure(target, structure),), (transfer_table(target, structure),))
