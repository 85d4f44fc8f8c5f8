"""The baseline: agents behind a router that hashes a session's name, as Ray Serve's consistent hash router does.

Such a router knows which replicas are there, and nothing of what they have. Here every agent hashes for itself and asks
the replica, which costs less than a router between them. A replica that comes back has its old places on the ring;
behind Ray it would have new ones. One that is away leaves the ring there; here the agent finds that out by asking it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from client import AsyncSession, AsyncSessions
from client.errors import DjinnError, Misdirected, NotFound
from client.models import Usage
from loadgen.experiments.cluster.agent import stream_turn
from loadgen.experiments.cluster.findings import Findings
from loadgen.experiments.cluster.retrying import code_of, is_harmless, is_retryable, pause
from loadgen.load.prompts import TokenIds
from loadgen.load.records import TurnCost
from loadgen.load.turn_clock import TurnClock, Wire
from loadgen.load.workload import Signals
from loadgen.targets import TargetSpec
from loadgen.targets.djinn import signal_leave, signal_return

PLACES, FALLBACKS = 100, 2
"""Each replica's places on the ring, and how many others are asked after the first: Ray Serve's own numbers
(`ray.serve.experimental.consistent_hash_router`).
"""


class Ring:
    """Consistent hashing (Karger et al., 1997). The package uhashring would do it with more choices than Ray has."""

    def __init__(self, names: Collection[str]) -> None:
        self._places = sorted((_hash(f"{name} {place}"), name) for name in names for place in range(PLACES))

    def order(self, key: str) -> list[str]:
        """All names, the one that the key belongs to first, and then in the order of the ring."""
        first = bisect(self._places, (_hash(key), ""))
        found = dict.fromkeys(name for _, name in (*self._places[first:], *self._places[:first]))
        return list(found)


@dataclass(slots=True)
class _Kept:
    """An agent's session at one replica, and how many tokens of the agent's history it has."""

    session: AsyncSession
    tokens: int = 0


class HashAgent:
    """One agent. Where its session is not, it opens another and sends the whole history."""

    is_exact = True

    def __init__(
        self, number: int, specs: Mapping[str, TargetSpec], ring: Ring, signals: Signals, findings: Findings
    ) -> None:
        self.number = number
        self.turns: list[tuple[TokenIds, TokenIds]] = []
        self._order = ring.order(f"agent {number}")[: 1 + FALLBACKS]
        self._signals, self._findings = signals, findings
        self._wire = Wire()
        self._transports = {name: specs[name].transport(self._wire.trace) for name in self._order}
        self._kept: dict[str, _Kept] = {}
        self._last: AsyncSession | None = None

    async def run_turn(self, new_ids: TokenIds, completion_tokens: int, clock: TurnClock) -> TurnCost:
        """See `Agent.run_turn`. The clock runs through all tries."""
        self._wire.clock = clock
        history = tuple(token for prompt, made in self.turns for token in (*prompt, *made))
        kept, made, usage = await self._try_all(history, new_ids, completion_tokens, clock)
        clock.over()
        again = len(history) - kept.tokens
        self._findings.cold += again > 0
        recomputed = usage.tokens_recomputed + max(0, again - max(0, usage.cached_tokens - kept.tokens))
        self.turns.append((new_ids, made))
        self._last, kept.tokens = kept.session, len(history) + len(new_ids) + len(made)
        return TurnCost(usage.prompt_tokens, len(made), usage.cached_tokens, recomputed, None)

    async def _try_all(
        self, history: TokenIds, new_ids: TokenIds, tokens: int, clock: TurnClock
    ) -> tuple[_Kept, TokenIds, Usage]:
        """Ask one replica after the other, round by round, until one has done the turn."""
        place, failed = 0, False
        while True:
            name = self._order[place]
            try:
                kept = self._kept.get(name) or await self._open(name)
                return kept, *await stream_turn(kept.session, (*history[kept.tokens :], *new_ids), tokens, clock)
            except DjinnError as error:
                is_lost = isinstance(error, NotFound | Misdirected) and name in self._kept
                if not (is_lost or is_retryable(error)):
                    raise
                if not is_harmless(error):  # gone, or in an unknown state
                    self._kept.pop(name, None)
                self._findings.retries.errors[code_of(error)] += 1
                if not failed:
                    self._findings.retries.turns.append((self.number, len(self.turns)))
                failed, place = True, place if is_lost else (place + 1) % len(self._order)
                if is_lost or place == 0:
                    await pause(error)

    async def _open(self, name: str) -> _Kept:
        self._kept[name] = _Kept(await AsyncSessions(self._transports[name]).create())
        return self._kept[name]

    async def leave(self, away_s: float | None) -> str | None:
        """See `signal_leave`. A replica that is away is told nothing."""
        return await self._told(lambda: signal_leave(self._last, self._signals, away_s))

    async def come_back(self) -> str | None:
        """See `signal_return`. A replica that is away is told nothing."""
        return await self._told(lambda: signal_return(self._last, self._signals))

    async def _told(self, tell: Callable[[], Awaitable[str | None]]) -> str | None:
        try:
            return await tell()
        except DjinnError as error:
            if not (is_retryable(error) or isinstance(error, NotFound | Misdirected)):
                raise
            self._findings.retries.errors[code_of(error)] += 1
            return None

    async def close(self) -> None:
        """Close the connections."""
        for transport in self._transports.values():
            await transport.close()


class HashAgents:
    """Makes the agents of one run, and has them all."""

    def __init__(self, urls: Mapping[str, str], timeout_s: float, signals: Signals, findings: Findings) -> None:
        self.every: list[HashAgent] = []
        self._specs = {name: TargetSpec(name, url, timeout_s=timeout_s) for name, url in urls.items()}
        self._ring, self._signals, self._findings = Ring(urls), signals, findings

    def new_agent(self) -> HashAgent:
        """The next one."""
        self.every.append(HashAgent(len(self.every), self._specs, self._ring, self._signals, self._findings))
        return self.every[-1]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
