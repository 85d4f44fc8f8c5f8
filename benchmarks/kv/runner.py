"""All measurements of one run, one after the other: first in this process, then on a server of their own."""

import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu_meter import CpuMeter, session_cpu_s
from benchmarks.kv.bandwidth import Copies, measure_copies
from benchmarks.kv.parks import ParkedTwice, measure_parks
from benchmarks.kv.plan import (
    BLOCK_TOKENS,
    DEVICE_TOKENS,
    DTYPE,
    GROWTH_TOKENS,
    HISTORY_TOKENS,
    SESSION_TOKENS,
    Plan,
    read_layout,
)
from benchmarks.kv.resume import ResumeBench, ResumeRound
from benchmarks.kv.signals import SignalTimes, measure_signals
from benchmarks.text import TokenSource, read_text_tokens
from client import Djinn, DjinnError
from loadgen.peers.djinn import djinn_launch
from loadgen.processes.launch import Launch
from loadgen.processes.process import ServerFailedError, free_port, running_server

SEED = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """The raw record of a run.

    session_bytes: KV of a session of `SESSION_TOKENS` tokens, which each copy moves; other_cpu_share: share, 0 to 1, of
    the benchmark's cores that processes outside it used, in the worse half of the run.
    """

    session_bytes: int
    copies: Copies
    resumes: list[ResumeRound]
    parks: list[ParkedTwice]
    signals: SignalTimes
    other_cpu_share: float


def server_launch(model: Path, port: int) -> Launch:
    """A server whose device holds one session, and whose host holds all."""
    flags = {
        "--model": str(model),
        "--dtype": DTYPE,
        "--port": str(port),
        "--block-size": str(BLOCK_TOKENS),
        "--kv-device": f"1x{DEVICE_TOKENS}",
        "--kv-host": f"8x{DEVICE_TOKENS}",
        "--state-dir": "none",
    }
    return djinn_launch(flags)


def measure(model: Path, plan: Plan, cores: list[int]) -> Measured:
    """Runs everything. Raises ServerFailedError if the server fails or does something else than is measured."""
    layout = read_layout(model)
    blocks = SESSION_TOKENS // BLOCK_TOKENS
    meter = CpuMeter(cores, time.process_time)
    copies = measure_copies(layout, blocks, plan.copies, SEED)
    other_share = meter.other_share()
    source = TokenSource(read_text_tokens(model))
    port = free_port()
    launch, base_url = server_launch(model, port), f"http://127.0.0.1:{port}"
    with running_server(launch.command, launch.environment, base_url) as server, Djinn(base_url) as client:
        meter = CpuMeter(cores, lambda: time.process_time() + session_cpu_s(server))
        try:
            resumes = _measure_resumes(client, source, plan.resume_rounds)
            parks = measure_parks(client, source, plan.parks, tokens=SESSION_TOKENS, growth=GROWTH_TOKENS)
            signals = measure_signals(client, base_url, source, signals=plan.signals, tokens=HISTORY_TOKENS)
        except DjinnError as error:
            raise ServerFailedError(str(error)) from error
        other_share = max(other_share, meter.other_share())
    return Measured(blocks * layout.block_bytes, copies, resumes, parks, signals, other_share)


def _measure_resumes(client: Djinn, source: TokenSource, rounds: int) -> list[ResumeRound]:
    other_tokens = DEVICE_TOKENS - BLOCK_TOKENS
    bench = ResumeBench(client, source, SEED, history_tokens=HISTORY_TOKENS, other_tokens=other_tokens)
    measured = bench.run(rounds)
    bench.close()
    return measured
