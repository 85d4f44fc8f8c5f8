"""What is shown and kept of a run."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.record import Run
from benchmarks.roofline.devices import DEVICES, LAUNCH_S, Device
from benchmarks.roofline.host import HostPlan, HostStep
from benchmarks.roofline.paper import CHOICE, GRAPH, PaperStep
from benchmarks.roofline.stages import MEANINGS, STAGES
from loadgen.report.charts import Chart
from loadgen.report.report import Report
from loadgen.report.tables import Row, Table

TITLE = "A decode step on paper, and its host"
MOST_HOST_US = 1000.0
"""The target, with `MOST_SESSIONS`."""
MOST_SESSIONS = 128
RATES, HOST_STAGES = "Rates", "Stages of the host"
USUAL = "greedy"
PAPER_NOTE = (
    f"A kernel takes its bytes over the bandwidth or its operations over the rate, and {LAUNCH_S * 1e6:g} µs for each "
    "launch. None of this ran on a GPU."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRun(Run):
    """The record of a run. `paper` are steps as they would be launched, `host` what was measured here, with a device
    that takes no time.
    """

    plan: HostPlan
    devices: tuple[Device, ...]
    launch_s: float
    paper: list[PaperStep]
    host: list[HostStep]
    other_cpu_share: float


def host_us(run: RooflineRun, sessions: int, sampling: str = USUAL) -> float | None:
    """The host's time for a step that is launched while another runs; None: that was not measured."""
    found = (h.p50_us for h in run.host if (h.sessions, h.sampling, h.in_turn) == (sessions, sampling, False))
    return next(found, None)


def bound_table(run: RooflineRun) -> Table:
    """Which bound holds where."""
    rows = []
    for step in _usual(run):
        taken = host_us(run, step.sessions)
        for device in DEVICES if taken is not None else ():
            bound = step.bound(device, (taken or 0.0) / 1e6)
            seconds = (bound.memory_s, bound.compute_s, bound.launch_s, bound.host_s)
            rows.append(
                (
                    step.model,
                    device.name,
                    str(step.sessions),
                    f"{step.moved() / 1e9:.1f}",
                    *(f"{each * 1e3:.2f}" for each in seconds),
                    f"{step.sessions / bound.step_s:,.0f}",
                    bound.holds,
                )
            )
    header = ("model", "device", "sessions", "GB", "memory, ms", "compute, ms", "launches, ms", "host, ms", "tokens/s")
    origins = "; ".join(f"{each.name}: {each.usable_bytes_per_s / 1e12:g} TB/s ({each.origin})" for each in DEVICES)
    note = f"{origins}. The host prepares the next step while one runs. {PAPER_NOTE}"
    return Table.of("Which bound holds", (*header, "holds"), rows, note)


def kernel_tables(run: RooflineRun) -> list[Table]:
    """One for each model and number of sessions that the host was measured with."""
    return [_kernel_table(step) for step in _usual(run) if host_us(run, step.sessions) is not None]


def choice_table(run: RooflineRun) -> Table:
    """What choosing tokens takes."""
    rows = [
        (
            step.model,
            step.sampling,
            str(step.sessions),
            str(step.launches(CHOICE)),
            f"{step.moved(CHOICE) / 1e6:,.1f}",
            *(f"{step.bound(device, 0.0, CHOICE).step_s * 1e6:,.0f}" for device in DEVICES),
        )
        for step in run.paper
        if host_us(run, step.sessions) is not None
    ]
    header = ("model", "tokens are", "sessions", "launches", "MB", *(f"{each.name}, µs" for each in DEVICES))
    note = f"A sort counts as one read and one write; it is several. {PAPER_NOTE}"
    return Table.of("Choosing tokens", header, rows, note)


def host_table(run: RooflineRun) -> Table:
    """What the host takes for a step."""
    rows = [
        (
            str(each.sessions),
            each.sampling,
            _launched(each),
            f"{each.p50_us:,.0f}",
            f"{each.p99_us:,.0f}",
            *(f"{each.stages_us[stage]:,.0f}" for stage in STAGES),
            _kept(each),
        )
        for each in run.host
    ]
    header = ("sessions", "tokens are", "launched", "p50, µs", "p99, µs", *STAGES, "kept")
    stages = "; ".join(f"{name}: {meaning}" for name, meaning in MEANINGS.items())
    note = (
        "CPU time of the engine's thread. Ahead: while the step before seems to run, as beside a GPU. A row that is "
        f"edited half-way up the layers cuts the graphs of all. {stages}. Stages are means of another run. "
        f"Kept: {MOST_HOST_US / 1e3:g} ms at most with {MOST_SESSIONS} sessions ahead."
    )
    return Table.of("The host, with a device that takes no time", header, rows, note)


def left_out(run: RooflineRun) -> str:
    """What a real device's driver asks of the host besides."""
    step = next(each for each in _usual(run) if each.sessions == MOST_SESSIONS)
    calls = next(each for each in run.host if each.sessions == MOST_SESSIONS and not each.in_turn)
    return (
        f"A GPU's driver is not in these times. Beside one replay of {step.launches(GRAPH)} kernels a greedy step of "
        f"{MOST_SESSIONS} rows launches {step.launches() - step.launches(GRAPH)} kernels, {calls.copies:g} copies and "
        f"{calls.events:g} events."
    )


def report_of(run: RooflineRun, command: tuple[str, ...]) -> Report:
    """What the page of a run says."""
    lead = (
        "What a decode step of Djinn's CUDA path takes at least: the bytes, operations and launches of each kernel, as "
        "the code launches them on PyTorch's meta device, over the figures of GPUs. Nothing here ran on a GPU.",
        f"The host's part was measured with a device that takes no time, on {run.place_and_time}. Other processes had "
        f"{run.other_cpu_share:.1%} of the cores.",
        left_out(run),
    )
    rates: list[Row] = [
        {"device": device.name, "of": s.model, "sessions": s.sessions, "rate": s.sessions / s.bound(device).step_s}
        for device in DEVICES
        for s in _usual(run)
    ]
    taken = [(count, host_us(run, count)) for count in sorted({each.sessions for each in run.host})]
    rates += [
        {"device": device.name, "of": "the host alone", "sessions": n, "rate": n / us * 1e6}
        for device in DEVICES
        for n, us in taken
        if us is not None
    ]
    stages: list[Row] = [
        {"step": _sessions(each.sessions), "stage": stage, "us": each.stages_us[stage]}
        for each in run.host
        if not each.in_turn and each.sampling == USUAL
        for stage in STAGES
    ]
    caption = "By what bounds the device, on paper, and by the host as measured here."
    return Report(
        experiment="roofline",
        title=TITLE,
        lead=lead,
        plan={},
        figures=(),
        tables=(
            bound_table(run),
            host_table(run),
            choice_table(run),
            *kernel_tables(run),
            Table(RATES, rates, shown=False),
            Table(HOST_STAGES, stages, shown=False),
        ),
        charts=(
            *(
                Chart(
                    f"Tokens a second at most, {device.name}",
                    caption,
                    "lines",
                    RATES,
                    "sessions",
                    "rate",
                    "of",
                    {"device": device.name},
                    log_x=True,
                    log_y=True,
                    x_label="sessions",
                    y_label="tokens a second",
                )
                for device in DEVICES
            ),
            Chart(
                "The host's time for a step",
                "By stage, greedy, launched while the step before seems to run.",
                "stack",
                HOST_STAGES,
                "step",
                "us",
                "stage",
                y_label="microseconds",
            ),
        ),
        command=command,
        machine=run.machine,
        versions=run.versions,
    )


def _usual(run: RooflineRun) -> list[PaperStep]:
    return [step for step in run.paper if step.sampling == USUAL]


def _sessions(count: int) -> str:
    return f"{count} session{'s' * (count > 1)}"


def _launched(step: HostStep) -> str:
    when = "in turn" if step.in_turn else "ahead"
    return f"{when}, {step.watched} row{'s' * (step.watched > 1)} edited" if step.watched else when


def _kept(step: HostStep) -> str:
    if step.sessions != MOST_SESSIONS or step.in_turn:
        return ""
    return "yes" if step.p50_us <= MOST_HOST_US else "no"


def _kernel_table(step: PaperStep) -> Table:
    rows = [
        (
            each.name,
            each.part,
            str(each.launches),
            f"{each.read / 1e6:,.1f}",
            f"{each.written / 1e6:,.1f}",
            f"{each.flops / 1e9:,.1f}",
            *(f"{each.bound(device).step_s * 1e6:,.0f}" for device in DEVICES),
            each.bound(DEVICES[0]).holds,
        )
        for each in step.kernels
    ]
    times = tuple(f"{each.name}, µs" for each in DEVICES)
    header = ("kernel", "part", "launches", "MB read", "MB written", "GFLOP", *times, "holds")
    title = f"{step.model}, {_sessions(step.sessions)} of {step.context:,} tokens"
    return Table.of(title, header, rows)
