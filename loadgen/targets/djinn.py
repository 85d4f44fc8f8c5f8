"""A Djinn server through its own protocol: agents, of whose turns only the new tokens travel; and its sessions,
memory and metrics, for experiments on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from client import AsyncSession, AsyncSessions, MemoryMap, calls
from client.calls import Call, TurnOptions
from client.models import Model
from loadgen.errors import LoadgenError
from loadgen.load.clocks import TurnClock, Wire
from loadgen.load.prompts import TokenIds
from loadgen.load.records import TurnCost
from loadgen.load.workload import InfinityAsNull, Signals
from loadgen.targets.base import MODELS, TargetSpec, check_context, tokenize_call


@dataclass(frozen=True, slots=True)
class Bucket:
    """How many observations were at most `upper` (infinite for the last bucket, which JSON writes as null)."""

    upper: InfinityAsNull
    count: float


def read_buckets(metrics: str, name: str) -> list[Bucket] | None:
    """The buckets of histogram `name` in the text of `/metrics`, labels summed up; None if there is no such one."""
    counts: defaultdict[float, float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == f"{name}_bucket":
                counts[float(sample.labels["le"])] += sample.value
    return [Bucket(upper, counts[upper]) for upper in sorted(counts)] or None


def between(before: list[Bucket], after: list[Bucket]) -> list[Bucket]:
    """What was observed between two readings of one histogram."""
    return [Bucket(new.upper, new.count - old.count) for old, new in zip(before, after, strict=True)]


def quantile(buckets: list[Bucket], share: float) -> float:
    """The value that `share` of the observations do not exceed, by the rule of Prometheus' `histogram_quantile`:
    linear within a bucket, the largest finite bound beyond it. Raises ValueError if nothing was observed.
    """
    rank = share * buckets[-1].count
    if not rank:
        raise ValueError("the histogram is empty")
    for below, bucket in pairwise([Bucket(0.0, 0.0), *buckets[:-1]]):
        if bucket.count >= rank:
            part = (rank - below.count) / (bucket.count - below.count)
            return below.upper + (bucket.upper - below.upper) * part
    return buckets[-2].upper


class DjinnTarget:
    """A Djinn server, whose agents tell it of their think times in the way of `signals`."""

    def __init__(self, spec: TargetSpec, signals: Signals) -> None:
        self.spec = spec
        self._signals = signals
        self._transport = spec.transport()

    async def prepare(self, tokens: int) -> None:
        check_context(self.spec, await self._transport.send(MODELS), tokens)

    async def tokenize(self, text: str, special: bool) -> TokenIds:
        return await self._transport.send(tokenize_call(text, special))

    def new_agent(self) -> DjinnAgent:
        """An agent whose session is opened with its first turn, and counts as part of it."""
        return DjinnAgent(self.spec, self._signals)

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.close()


class DjinnAgent:
    """An agent whose history is a session on the server, on connections of its own."""

    is_exact = True

    def __init__(self, spec: TargetSpec, signals: Signals) -> None:
        self._wire = Wire()
        self._transport = spec.transport(self._wire.trace)
        self._sessions = AsyncSessions(self._transport)
        self._signals = signals
        self._session: AsyncSession | None = None

    async def run_turn(self, new_ids: TokenIds, completion_tokens: int, clock: TurnClock) -> TurnCost:
        """Send the new tokens and read the events of the turn; once it is over, ask where its time went."""
        self._wire.clock = clock
        if self._session is None:
            self._session = await self._sessions.create()
        running = self._session.stream(
            token_ids=new_ids, max_tokens=completion_tokens, ignore_eos=True, temperature=0.0
        )
        async with running as turn:
            async for event in turn:
                if event.token_ids:
                    clock.tokens()
        clock.over()
        usage = turn.turn.usage
        resume_ms = (await self._session.refresh()).usage.resume_ms
        return TurnCost(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            recomputed_tokens=usage.tokens_recomputed,
            resume_ms=resume_ms.model_dump(),
            token_ids=turn.turn.token_ids,
        )

    async def leave(self, away_s: float | None) -> str | None:
        """See `signal_leave`."""
        return await signal_leave(self._session, self._signals, away_s)

    async def come_back(self) -> str | None:
        """See `signal_return`."""
        return await signal_return(self._session, self._signals)

    async def close(self) -> None:
        """Close the session, if there is one, for the server to free what it held; and the connections."""
        try:
            if self._session is not None:
                await self._session.close()
        finally:
            await self._transport.close()


async def signal_leave(session: AsyncSession | None, signals: Signals, away_s: float | None) -> str | None:
    """Send `io_wait`, with the time of return if there is one and signals have it; returns the phase."""
    if session is None or signals is Signals.NONE:
        return None
    resume_in_ms = 1000 * away_s if signals is Signals.ETA and away_s is not None else None
    return (await session.set_phase("io_wait", resume_in_ms=resume_in_ms)).phase


async def signal_return(session: AsyncSession | None, signals: Signals) -> str | None:
    """Send `ready`, unless the server knows the time of return; returns the phase."""
    if session is None or signals is not Signals.READY:
        return None
    return (await session.set_phase("ready")).phase


HISTOGRAMS = ("djinn_checkpoint_save_seconds", "djinn_checkpoint_restore_seconds", "djinn_resume_dispatch_seconds")
METRICS = Call("GET", "/metrics", bytes.decode)


def greedy(prompt: TokenIds, tokens: int | None = None) -> TurnOptions:
    """A turn of exactly `tokens` tokens, or of as many as the context has room for."""
    options: TurnOptions = {"token_ids": prompt, "temperature": 0.0, "ignore_eos": True}
    return options if tokens is None else {**options, "max_tokens": tokens}


class Subject:
    """A Djinn server. Raises `LoadgenError` for a target that is to be spoken to as another."""

    def __init__(self, spec: TargetSpec) -> None:
        if spec.model is not None:
            raise LoadgenError(f"target {spec.name}: this experiment is for Djinn servers: leave #{spec.model} out")
        self.spec = spec
        self.num_layers = 0
        self._transport = spec.transport()
        self._sessions = AsyncSessions(self._transport)

    async def prepare(self, tokens: int) -> None:
        """Ask what the server runs. Raises `LoadgenError` unless its context holds `tokens` tokens."""
        models = await self._transport.send(MODELS)
        check_context(self.spec, models, tokens)
        self.num_layers = (await self.model()).layers

    async def model(self) -> Model:
        """What it runs."""
        model, *_ = await self._transport.send(calls.models())
        return model

    async def tokenize(self, text: str, special: bool) -> TokenIds:
        """The ids of `text` in the server's model, with its special tokens in front if `special`."""
        return await self._transport.send(tokenize_call(text, special))

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A session of its own, closed at the end of the block."""
        async with await self._sessions.create() as session:
            yield session

    @asynccontextmanager
    async def imported(self, path: Path) -> AsyncIterator[AsyncSession]:
        """A session from an exported file, closed at the end of the block."""
        async with await self._sessions.import_from(path) as session:
            yield session

    async def answer(self, prompt: TokenIds, tokens: int) -> TokenIds:
        """What a session without breakpoints says."""
        async with self.session() as session:
            return (await session.generate(**greedy(prompt, tokens))).token_ids

    async def memory(self) -> MemoryMap:
        """Where the engine's memory is."""
        return await self._transport.send(calls.memory())

    async def histograms(self) -> dict[str, list[Bucket]]:
        """The server's own of `HISTOGRAMS`, as far as it has them."""
        metrics = await self.metrics()
        return {name: found for name in HISTOGRAMS if (found := read_buckets(metrics, name)) is not None}

    async def metrics(self) -> str:
        """The text of `/metrics`."""
        return await self._transport.send(METRICS)

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.close()
