"""`python -m benchmarks.kv`: KV moves beside a plain copy, and what sessions that have been away wait for."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import numpy as np
import torch

from app.domain.values import SessionId
from app.gpu.device.streams import PASSED, CpuStreams
from app.gpu.kv.mover import KVMover
from app.gpu.kv.pools import HostPool, KVPool
from app.gpu.models.base import LayerStack
from app.gpu.state.kv_header import KVIdentity, KVLayout
from app.gpu.state.layer_state import attention_state
from app.gpu.state.moves import Move, MoveKind
from benchmarks.command import Benchmark
from benchmarks.cpu_meter import CpuMeter, session_cpu_s
from benchmarks.spread import middle_half, ratio_of_medians
from benchmarks.text import TokenSource, read_text_tokens
from client import Djinn, DjinnError, Session, Turn
from client.models import Phase, Tier
from loadgen.peers.djinn import djinn_launch
from loadgen.processes.launch import ROOT, Launch, without_folders
from loadgen.processes.process import ServerFailedError, free_port, running_server
from loadgen.report.figures import Figure, Spread, Target
from loadgen.targets.histogram import Bucket, between, quantile, read_buckets

DTYPE = "float32"
BLOCK_TOKENS = 16
SESSION_TOKENS = 1024
HISTORY_TOKENS = 1000
GROWTH_TOKENS = 64
DEVICE_TOKENS = 1152
"""What the server's device tier holds: one session, so that a second one passing through leaves nothing of it there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """copies: of one session's KV; resume_rounds: turns of each kind; parks: sessions parked twice; signals: sent."""

    copies: CopyPlan
    resume_rounds: int
    parks: int
    signals: int


def read_layout(model: Path) -> KVLayout:
    """The shape of one KV block of the model in this folder."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    return KVLayout(
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads", heads),
        block_size=BLOCK_TOKENS,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        dtype=DTYPE,
    )


POLL_S = 0.002
TIMEOUT_S = 10.0


def first_token_s(session: Session, token_ids: Sequence[int]) -> float:
    """Seconds from a request with new tokens to the first token of the answer, which has no other.

    Raises ServerFailedError if any KV had to be recomputed.
    """
    begin = time.perf_counter()
    with session.stream(token_ids=token_ids, max_tokens=1, temperature=0, ignore_eos=True) as stream:
        next(iter(stream))
        seconds = time.perf_counter() - begin
        for _ in stream:
            pass
    check_nothing_recomputed(stream.turn)
    return seconds


def extend(session: Session, token_ids: Sequence[int]) -> None:
    """Run a turn with new tokens that generates one more, with the checks of `first_token_s`."""
    turn = session.generate(token_ids=token_ids, max_tokens=1, temperature=0, ignore_eos=True)
    check_nothing_recomputed(turn)


def park(session: Session) -> None:
    """Signal `io_wait`, and return when the KV has left the device."""
    session.set_phase("io_wait")
    wait_for_tier(session, "host")


def fetch(session: Session) -> None:
    """Signal `ready`, and return when the KV is back on the device."""
    session.set_phase("ready")
    wait_for_tier(session, "device")


def wait_for_tier(session: Session, tier: Tier, timeout_s: float = TIMEOUT_S) -> None:
    """Return when the session's KV is in `tier`. Raises ServerFailedError if it does not come there in time."""
    deadline = time.monotonic() + timeout_s
    while session.refresh().kv.tier != tier:
        if time.monotonic() > deadline:
            raise ServerFailedError(f"after {timeout_s:g} s KV is in tier {session.info.kv.tier}, not {tier}")
        time.sleep(POLL_S)


def check_nothing_recomputed(turn: Turn) -> None:
    """Raises ServerFailedError if the turn lost KV that an earlier one had computed."""
    if turn.usage.tokens_recomputed:
        raise ServerFailedError(f"the server computed {turn.usage.tokens_recomputed} tokens again")


POOL_SESSIONS = 4
"""So many sessions fit in each pool: together they are larger than the caches, and ids can be far apart."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """`rounds` between the same buffers, after which new ones are allocated: how fast memory is depends on where the
    machine has it.
    """

    allocations: int
    rounds: int


@dataclass(frozen=True, slots=True)
class CopyRound:
    """Seconds that each copy of one session's KV took: a plain one, and moves of two kinds of blocks."""

    memcpy: float
    out_neighbouring: float
    out_scattered: float
    in_neighbouring: float
    in_scattered: float


@dataclass(frozen=True, slots=True)
class Copies:
    """first_out_s: seconds of a move out to host memory that nobody has written yet, one for each allocation."""

    rounds: list[CopyRound]
    first_out_s: list[float]


def measure_copies(layout: KVLayout, blocks: int, plan: CopyPlan, seed: int) -> Copies:
    """Copies of sessions of `blocks` blocks, one after the other."""
    chooser = random.Random(seed)
    copies = Copies([], [])
    for _ in range(plan.allocations):
        bench = CopyBench(layout, blocks, chooser)
        copies.first_out_s.append(bench.first_out_s)
        copies.rounds.extend(bench.run(plan.rounds))
    return copies


class CopyBench:
    """Pools for sessions of `blocks` blocks, and as much of NumPy's own memory for the plain copy, all written once."""

    def __init__(self, layout: KVLayout, blocks: int, chooser: random.Random) -> None:
        self._blocks = blocks
        self._random = chooser
        pool_blocks = POOL_SESSIONS * blocks
        device = _device_pool(layout, pool_blocks)
        host = HostPool(device, pool_blocks, CpuStreams())
        self._mover = KVMover(host, KVIdentity("", 1, layout), disk=None)
        self._source, self._target = (np.empty((pool_blocks, layout.block_bytes), np.uint8) for _ in range(2))
        # The machine gives memory when it is first written, which must not be on the clock of the other copies.
        device.data.numpy().fill(1)
        self.first_out_s = self._move(MoveKind.OUT, self._neighbours)
        for memory in (host.data.numpy(), self._source, self._target):
            memory.fill(1)

    def run(self, repeats: int) -> list[CopyRound]:
        """Rounds in which each copy has one turn, in a new order every time, each between other blocks."""
        self._round()  # not kept: what is looked up once has been looked up
        return [self._round() for _ in range(repeats)]

    def _round(self) -> CopyRound:
        copies: dict[str, Callable[[], float]] = {
            "memcpy": self._memcpy,
            "out_neighbouring": lambda: self._move(MoveKind.OUT, self._neighbours),
            "out_scattered": lambda: self._move(MoveKind.OUT, self._scattered),
            "in_neighbouring": lambda: self._move(MoveKind.IN, self._neighbours),
            "in_scattered": lambda: self._move(MoveKind.IN, self._scattered),
        }
        order = self._random.sample(list(copies), len(copies))
        return CopyRound(**{name: copies[name]() for name in order})

    def _memcpy(self) -> float:
        source, target = self._neighbours(), self._neighbours()
        origin, goal = self._source[source[0] : source[-1] + 1], self._target[target[0] : target[-1] + 1]
        begin = time.perf_counter()
        np.copyto(goal, origin)
        return time.perf_counter() - begin

    def _move(self, kind: MoveKind, choose: Callable[[], tuple[int, ...]]) -> float:
        move = Move(1, kind, SessionId("bench"), source=choose(), target=choose())
        begin = time.perf_counter()
        report = self._mover.carry_out(move, PASSED)
        seconds = time.perf_counter() - begin
        if report.error is not None:
            raise RuntimeError(f"the move failed: {report.error}")
        return seconds

    def _neighbours(self) -> tuple[int, ...]:
        first = self._random.randrange((POOL_SESSIONS - 1) * self._blocks + 1)
        return tuple(range(first, first + self._blocks))

    def _scattered(self) -> tuple[int, ...]:
        return tuple(self._random.sample(range(POOL_SESSIONS * self._blocks), self._blocks))


def _device_pool(layout: KVLayout, blocks: int) -> KVPool:
    """A CPU's pool for a model of this shape, without the model."""
    shape = SimpleNamespace(
        num_layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        states=layout.layers * [attention_state(layout.kv_heads, layout.head_dim, None)],
        dtype=getattr(torch, layout.dtype),
        device=torch.device("cpu"),
    )
    return KVPool(cast("LayerStack", shape), blocks, layout.block_size)


NEW_TOKENS = 16
REST_S = 0.4
"""From the end of a turn to the beginning of the next, whatever its kind and however long it takes to prepare: a
`ready` has most of that to be carried out. A processor that has rested for longer is slower to come back.
"""
WAKE_TOKENS = 6
"""Generated by another session at the end of the rest: every turn finds the processor as awake as it is at work."""


@dataclass(frozen=True, slots=True)
class ResumedTurn:
    """first_token_s: as the client sees it; restore_s: how long, by the server, the turn waited for its KV."""

    first_token_s: float
    restore_s: float


@dataclass(frozen=True, slots=True)
class ResumeRound:
    """One turn of each kind, in random order. The second resident one tells how much of a difference is noise."""

    resident: ResumedTurn
    resident_again: ResumedTurn
    ready: ResumedTurn
    cold: ResumedTurn


class ResumeBench:
    """One session whose history always has the same length, and another that takes its place on the device.

    A device keeps the blocks of a session that has been parked until somebody needs the room, and a session that
    comes back soon finds them there. The other session must be as large as the device less one block, which a prefetch
    leaves to a session that had a turn just before: then it leaves nothing to be found.
    """

    def __init__(
        self, client: Djinn, source: TokenSource, seed: int, *, history_tokens: int, other_tokens: int
    ) -> None:
        self._source = source
        self._random = random.Random(seed)
        self._history_tokens = history_tokens
        data = client.memory().data
        self._kv_bytes = history_tokens // data.block_tokens * data.block_bytes
        self._session = client.sessions.create()
        extend(self._session, source.take(history_tokens))
        self._session.rewind(history_tokens)
        park(self._session)
        self._waker = client.sessions.create()
        self._other = client.sessions.create()
        extend(self._other, source.take(other_tokens))
        park(self._other)
        fetch(self._session)
        self._ended = time.perf_counter()

    def run(self, rounds: int) -> list[ResumeRound]:
        """Turns in random alternation. Raises ServerFailedError if one of them did not come back as its kind does."""
        self._round()  # not kept: nothing shall be allocated or compiled under the clock
        return [self._round() for _ in range(rounds)]

    def close(self) -> None:
        """Free what the sessions hold."""
        self._session.close()
        self._other.close()
        self._waker.close()

    def _round(self) -> ResumeRound:
        kinds = {"resident": self._turn, "resident_again": self._turn, "ready": self._ready, "cold": self._cold}
        order = self._random.sample(list(kinds), len(kinds))
        return ResumeRound(**{kind: kinds[kind]() for kind in order})

    def _ready(self) -> ResumedTurn:
        before = self._send_away()
        fetch(self._session)
        self._check_copied(before)
        turn = self._turn()
        if turn.restore_s:
            raise ServerFailedError("a session that was back on the device had to wait for its KV")
        return turn

    def _cold(self) -> ResumedTurn:
        before = self._send_away()
        turn = self._turn()
        self._check_copied(before)
        return turn

    def _send_away(self) -> int:
        """Park the session and let the other one pass over the device; returns the session's `bytes_in` so far."""
        park(self._session)
        fetch(self._other)
        park(self._other)
        return self._session.info.usage.bytes_in

    def _turn(self) -> ResumedTurn:
        new_tokens = self._source.take(NEW_TOKENS)
        time.sleep(max(0.0, self._ended + REST_S - time.perf_counter()))
        self._waker.generate(token_ids=new_tokens[:2], max_tokens=WAKE_TOKENS, temperature=0, ignore_eos=True)
        self._waker.rewind(0)
        seconds = first_token_s(self._session, new_tokens)
        restore_ms = self._session.rewind(self._history_tokens).usage.resume_ms.restore
        self._ended = time.perf_counter()
        return ResumedTurn(seconds, restore_ms / 1000)

    def _check_copied(self, before: int) -> None:
        copied = self._session.refresh().usage.bytes_in - before
        if copied < 0.9 * self._kv_bytes:
            raise ServerFailedError(f"{copied} of {self._kv_bytes} bytes came back: the device had the rest")


@dataclass(frozen=True, slots=True)
class ParkedTwice:
    """Bytes of one session that left the device up to its first park, and from there to its second."""

    first_bytes: int
    second_bytes: int


def measure_parks(client: Djinn, source: TokenSource, sessions: int, *, tokens: int, growth: int) -> list[ParkedTwice]:
    """Sessions of `tokens` tokens that grow by `growth`, the generated ones included, one after the other.

    Raises ServerFailedError if KV does not move as it is told to, or is lost.
    """
    return [_park_twice(client, source, tokens, growth) for _ in range(sessions)]


def _park_twice(client: Djinn, source: TokenSource, tokens: int, growth: int) -> ParkedTwice:
    with client.sessions.create() as session:
        extend(session, source.take(tokens - 1))
        first = _parked_bytes(session)
        fetch(session)
        extend(session, source.take(growth - 1))
        return ParkedTwice(first, _parked_bytes(session) - first)


def _parked_bytes(session: Session) -> int:
    """Bytes that have left the device when a park is over, those that left early included."""
    park(session)
    return session.info.usage.bytes_out


SERVER_HISTOGRAM = "djinn_signal_seconds"
PAUSE_S = 0.01
PHASES: tuple[Phase, Phase] = ("io_wait", "ready")


@dataclass(frozen=True, slots=True)
class SignalTimes:
    """server: the server's time from parsed request to acknowledged command, in s; None if it does not tell."""

    round_trips_s: list[float]
    server: list[Bucket] | None


def measure_signals(client: Djinn, base_url: str, source: TokenSource, *, signals: int, tokens: int) -> SignalTimes:
    """Tell a server that does nothing else, again and again, that a session of `tokens` tokens waits and is back."""
    with client.sessions.create() as session:
        extend(session, source.take(tokens))
        before = _server_buckets(base_url)
        round_trips = []
        for index in range(signals):
            time.sleep(PAUSE_S)
            begin = time.perf_counter()
            session.set_phase(PHASES[index % 2])
            round_trips.append(time.perf_counter() - begin)
        after = _server_buckets(base_url)
    return SignalTimes(round_trips, between(before, after) if before and after else None)


def _server_buckets(base_url: str) -> list[Bucket] | None:
    return read_buckets(httpx.get(f"{base_url}/metrics").raise_for_status().text, SERVER_HISTOGRAM)


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


BANDWIDTH = Target(0.9, at_least=True)
READY, COLD = Target(1.05), Target(1.0)
SECOND_PARK = Target(0.1)
SIGNAL_MS = Target(0.1)


def figures_of(measured: Measured) -> list[Figure]:
    """The whole table."""
    return [
        *_copy_figures(measured.copies, measured.session_bytes),
        *_resume_figures(measured.resumes),
        _park_figure(measured.parks),
        *_signal_figures(measured.signals),
    ]


def _copy_figures(copies: Copies, copied: int) -> list[Figure]:
    def ratio(label: str, seconds: Callable[[CopyRound], float]) -> Figure:
        ratios = [entry.memcpy / seconds(entry) for entry in copies.rounds]
        return Figure(f"{label}, of the plain copy's rate", "×", middle_half(ratios), BANDWIDTH)

    plain = middle_half([copied / entry.memcpy / 1e9 for entry in copies.rounds])
    first = Spread.over([copied / seconds / 1e9 for seconds in copies.first_out_s])
    return [
        Figure(f"Plain copy of {copied / 2**20:.0f} MiB", "GB/s", plain),
        ratio("Move out, neighbouring blocks", lambda entry: entry.out_neighbouring),
        ratio("Move out, scattered blocks", lambda entry: entry.out_scattered),
        ratio("Move in, neighbouring blocks", lambda entry: entry.in_neighbouring),
        ratio("Move in, scattered blocks", lambda entry: entry.in_scattered),
        Figure("Move out to memory never written before", "GB/s", first),
    ]


def _resume_figures(rounds: list[ResumeRound]) -> list[Figure]:
    def times(label: str, seconds: Callable[[ResumeRound], float]) -> Figure:
        return Figure(label, "ms", middle_half([seconds(entry) * 1e3 for entry in rounds]))

    resident = [entry.resident.first_token_s for entry in rounds]
    again = [entry.resident_again.first_token_s for entry in rounds]
    ready = [entry.ready.first_token_s for entry in rounds]
    cold = [entry.cold.first_token_s for entry in rounds]
    restored = [entry.resident.first_token_s + entry.cold.restore_s for entry in rounds]
    return [
        times("First token, resident", lambda entry: entry.resident.first_token_s),
        times("First token, `ready` sent ahead", lambda entry: entry.ready.first_token_s),
        times("First token, cold from host", lambda entry: entry.cold.first_token_s),
        times("Restore in a cold turn", lambda entry: entry.cold.restore_s),
        Figure("Resident again / resident: the noise", "×", ratio_of_medians(again, resident)),
        Figure("`ready` sent ahead / resident", "×", ratio_of_medians(ready, resident), READY),
        Figure("Cold / (resident + restore)", "×", ratio_of_medians(cold, restored), COLD),
    ]


def _park_figure(parks: list[ParkedTwice]) -> Figure:
    ratios = [entry.second_bytes / entry.first_bytes for entry in parks]
    return Figure("Bytes of a second park / first", "×", Spread.over(ratios), SECOND_PARK)


def _signal_figures(signals: SignalTimes) -> list[Figure]:
    p50, p99 = np.quantile(signals.round_trips_s, [0.5, 0.99]) * 1e3
    figures = [_point("Signal, HTTP round trip, p50", p50), _point("Signal, HTTP round trip, p99", p99)]
    if signals.server is not None:
        p50, p99 = (quantile(signals.server, share) * 1e3 for share in (0.5, 0.99))
        figures += [_point("Signal, in the server, p50", p50), _point("Signal, in the server, p99", p99, SIGNAL_MS)]
    return figures


def _point(label: str, milliseconds: float, target: Target | None = None) -> Figure:
    return Figure(label, "ms", Spread.over([float(milliseconds)]), target)


def _settings(model: Path) -> Launch:
    return without_folders(server_launch(model, port=0), [ROOT, model.parent])


def _spreads(plan: Plan) -> str:
    return (
        f"Copies: {plan.copies.allocations * plan.copies.rounds} of each kind. "
        f"Turns: {plan.resume_rounds} of each kind. Sessions parked twice: {plan.parks}. Signals: {plan.signals}.\n"
        "Spreads are the middle half of the rounds, those of parks and first moves the lowest and the highest."
    )


FULL = Plan(CopyPlan(allocations=10, rounds=10), resume_rounds=50, parks=3, signals=300)
QUICK = Plan(CopyPlan(allocations=2, rounds=5), resume_rounds=6, parks=1, signals=40)


BENCHMARK = Benchmark("kv", "KV between tiers", __doc__, QUICK, FULL, measure, figures_of, _settings, _spreads)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
