"""What is wrong with a server, in sentences that an operator reads in ten seconds, and how many more agents fit.

The page, `djinn top` and `GET /v1/findings` all show these.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from app.domain.errors import DjinnError
from app.domain.memory_map import MemoryMap
from app.domain.values import Phase, SessionId, SessionState
from app.machine.budget import DiskRoom
from app.machine.files import counted, size
from app.sessions.session import Session
from app.sessions.table import SessionTable
from app.settings import Settings

FindingKind = Literal[
    "unready",
    "replica",
    "killed",
    "disk",
    "waiting",
    "refused",
    "silent",
    "late",
    "device",
    "host",
    "kv_disk",
    "recomputed",
]
"""The gravest first."""

LATE_S = 2.0
"""How late a client is before it is said."""
SILENT_S, SILENT_TURNS = 5.0, 4
"""For how long, or in how many turns, a session signals nothing before it is said, if it holds a `LARGE` part."""
CROWD_SILENT_S = 60.0
"""For how long sessions signal nothing before it is said of all of them together, if the device is `CROWDED`."""
LARGE, CROWDED, NEARLY_FULL = 0.25, 0.6, 0.95
"""Shares of a tier: a large session; full enough to name who holds it; nearly full."""
RECENT_S = 600.0
"""For how long a kill and recomputed tokens are reported."""
DISK_SHARE, MOST_DISK = 1 / 20, 10 << 30
"""A disk has little room with less free than this share, or this many bytes, or another time its reserve."""
MOST_NAMED, MOST_SESSIONS = 3, 100
"""Sessions that have a sentence of their own, and most that one sentence is about."""
SAMPLE_S = 1.0
QUEUES_KEPT = 5
"""Samples of the queue: a finding that comes and goes could not be read."""
HORIZON_S = 120.0
"""Over how long means go for what there is room for."""
FORGOTTEN = 1e-3
"""What a mean has come to a quarter of an hour after the last turn: nothing."""
MANY_WAITING = 0.5
"""Turns in the queue, on average: more agents would only make it longer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence, and whom it is about: `sessions`, the worst first, or a tenant."""

    kind: FindingKind
    text: str
    sessions: tuple[SessionId, ...] = ()
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many `more` agents like those of the last minutes have room, and why no more."""

    more: int
    text: str


@dataclass(slots=True)
class _Means:
    """Over `HORIZON_S`, of agents: those with KV, its bytes, those of them that are working or about to, with their
    bytes, and turns in the queue.
    """

    agents: float = 0.0
    kv: float = 0.0
    working: float = 0.0
    kv_of_working: float = 0.0
    waiting: float = 0.0


class Findings:
    """Used on the event loop only."""

    def __init__(
        self,
        table: SessionTable,
        settings: Settings,
        room: DiskRoom,
        *,
        was_killed: bool,
        require_ready: Callable[[], None],
        away: Callable[[], Iterable[str]],
        refused: Callable[[], Mapping[str, int]],
    ) -> None:
        """`room` is that of files beside the journal. `was_killed`: the server before this one was, or crashed.
        `require_ready` raises a `DjinnError` while no new work is taken, `away` names the replicas that may have
        sessions and do not answer, `refused` counts each tenant's requests that its limits refused in the last minute.
        """
        self._table, self._replica, self._max_running = table, settings.replica, settings.max_running
        self._back_since = time.time() if was_killed else 0.0
        self._require_ready, self._away, self._refused_to = require_ready, away, refused
        folders = [each.expanduser() for each in (settings.state_dir, settings.engine().kv_dir) if each is not None]
        self._disks = {room.beside(folder): folder for folder in reversed(folders)}
        self._queues: deque[Counter[str]] = deque(maxlen=QUEUES_KEPT)
        """Turns in the queue by tenant."""
        self._means = _Means()

    async def run(self) -> None:
        """Look at the sessions, again and again. Endless."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)

    def sample(self) -> None:
        """Take the queue and the use of memory into account."""
        queue, now = Counter[str](), _Means()
        for session in self._table:
            if session.state is SessionState.QUEUED:
                queue[session.owner or ""] += 1
                now.waiting += session.is_agent
            if not session.is_agent:
                continue
            held = _held(session)
            now.agents += held > 0
            now.kv += held
            if session.under_way or (held and session.phase is Phase.READY):
                now.working += 1
                now.kv_of_working += held
        self._queues.append(queue)
        weight = SAMPLE_S / HORIZON_S
        for name in _Means.__slots__:
            mean = getattr(self._means, name)
            mean += weight * (getattr(now, name) - mean)
            setattr(self._means, name, mean if mean > FORGOTTEN else 0.0)

    def tell(self, memory: MemoryMap | None, owner: str | None, *, is_operator: bool) -> list[Finding]:
        """All that this caller may know, the gravest first. An operator, and everybody where there are no tenants,
        hears of the server and of all sessions. `memory`: None while the engine does not tell.
        """
        sees_all = is_operator or owner is None
        sessions = list(self._table if sees_all else self._table.owned_by(owner))
        found = [
            self._server() if sees_all else (),
            self._waiting(None if sees_all else owner or ""),
            self._refused(None if sees_all else owner),
            () if memory is None else _silent(sessions, memory, owner),
            _late(sessions, owner),
            _full(memory) if sees_all and memory is not None else (),
            _recomputed(sessions, owner),
        ]
        prefix = "" if self._replica is None else f"{self._replica}: "
        return [
            each if each.kind == "replica" else Finding(each.kind, prefix + each.text, each.sessions, each.tenant)
            for each in chain.from_iterable(found)
        ]

    def capacity(self, memory: MemoryMap) -> Capacity | None:
        """What there is room for, if the next agents do as those of the last minutes; None where nothing was done."""
        means = self._means
        if not means.working or not means.kv_of_working:
            return None
        each = means.kv / means.agents
        works = min(1.0, means.working / means.agents)
        room = sum(tier.total_bytes for tier in (memory.device, memory.host, memory.disk))
        limits = {
            "memory of the device": _most_at_once(memory.device.total_bytes / each, means.kv_of_working / means.kv),
            "turns in one step": _most_at_once(self._max_running, works),
            "memory of all tiers": room / each,
        }
        limit = min(limits, key=limits.__getitem__)
        more = max(0, math.floor(limits[limit]) - sum(each.is_agent and _held(each) > 0 for each in self._table))
        about = f"each has {size(each)} of KV and works {works:.0%} of the time"
        if means.waiting > MANY_WAITING:
            return Capacity(0, f"turns wait as it is; {about}")
        return Capacity(more, f"{about}, and the limit is the {limit}")

    def _server(self) -> Iterator[Finding]:
        try:
            self._require_ready()
        except DjinnError as error:
            yield Finding("unready", f"takes no new work: {error.message}")
        for name in self._away():
            yield Finding("replica", f"replica {name} is away, and with it the sessions that it has")
        back_s = time.time() - self._back_since
        if back_s < RECENT_S:
            yield Finding("killed", f"the server was killed, or crashed; it came back {_span(back_s)} ago")
        for room, folder in self._disks.items():
            with contextlib.suppress(OSError):
                yield from _scarce(folder, room)

    def _waiting(self, tenant: str | None) -> Iterator[Finding]:
        """The longest queue of the last seconds, and whose it is. `tenant`: only that one's."""
        queue = max(self._queues, key=Counter.total, default=Counter[str]())
        total = queue.total() if tenant is None else queue[tenant]
        if not total:
            return
        text, (most, count) = f"{counted(total, 'turn')} in the queue", queue.most_common(1)[0]
        if tenant is None and most and 1 < total < 2 * count:
            yield Finding("waiting", f"{text}, {count} of them of tenant {most}", tenant=most)
        else:
            yield Finding("waiting", text)

    def _refused(self, only: str | None) -> Iterator[Finding]:
        for tenant, count in Counter(self._refused_to()).most_common():
            if only in (None, tenant):
                text = f"tenant {tenant} is at its limits: {counted(count, 'request')} refused in a minute"
                yield Finding("refused", text, tenant=tenant)


def _scarce(folder: Path, room: DiskRoom) -> Iterator[Finding]:
    """Raises `OSError`."""
    kept = f" of the {size(room.reserve)} for the journal" if room.reserve else ""
    if missing := room.missing:
        text = f"the disk of {folder} is full: {size(missing)}{kept} are missing; KV files go, exports are refused"
        yield Finding("disk", text)
    elif room.free < max(room.reserve, min(DISK_SHARE * room.total, MOST_DISK)):
        beside = f" beside the {size(room.reserve)} for the journal" if room.reserve else ""
        yield Finding("disk", f"the disk of {folder} is nearly full: {size(room.free)} are left{beside}")


def _silent(sessions: Collection[Session], memory: MemoryMap, owner: str | None) -> Iterator[Finding]:
    """Who holds the device and does not say what for."""
    now, total = time.time(), memory.device.total_bytes
    still = {
        each: now - each.used_at
        for each in sessions
        if each.phase is Phase.COMPUTE and each.kv.device_bytes and not each.under_way
    }
    large = [each for each in sessions if each.kv.device_bytes >= LARGE * total and each.phase is Phase.COMPUTE]
    for each in sorted(large, key=lambda each: each.kv.device_bytes, reverse=True)[:MOST_NAMED]:
        silent_s = still.get(each, 0.0)
        if silent_s > SILENT_S or each.unsignalled >= SILENT_TURNS:
            since = f"for {_span(silent_s)}" if silent_s > SILENT_S else f"in {each.unsignalled} turns"
            share = each.kv.device_bytes / total
            text = f"{_called(each, owner)} holds {share:.0%} of the device, and has signalled nothing {since}"
            yield Finding("silent", text, (each.id,))
    many = [each for each, silent_s in still.items() if silent_s > CROWD_SILENT_S and each not in large]
    if many and memory.device.owned_bytes >= CROWDED * total:
        many.sort(key=lambda each: each.kv.device_bytes, reverse=True)
        # They may share blocks.
        share = min(sum(each.kv.device_bytes for each in many), memory.device.owned_bytes) / total
        text = f"{counted(len(many), 'session')} without a turn or a signal for a minute: {share:.0%} of the device"
        yield Finding("silent", f"{text}, {_called(many[0], owner)} most", _ids(many))


def _late(sessions: Collection[Session], owner: str | None) -> Iterator[Finding]:
    now = time.time()
    late = {
        each: now - each.returns_at
        for each in sessions
        if each.returns_at is not None and each.phase is Phase.IO_WAIT and now - each.returns_at > LATE_S
    }
    if late:
        worst = sorted(late, key=late.__getitem__, reverse=True)
        text = f"{counted(len(late), 'client')} later than announced: {_called(worst[0], owner)} by"
        yield Finding("late", f"{text} {_span(late[worst[0]])}", _ids(worst))


def _full(memory: MemoryMap) -> Iterator[Finding]:
    kinds: tuple[FindingKind, ...] = ("device", "host", "kv_disk")
    for kind, use in zip(kinds, (memory.device, memory.host, memory.disk), strict=True):
        if use.total_bytes and use.owned_bytes >= NEARLY_FULL * use.total_bytes:
            name = {"host": "host memory", "kv_disk": "KV on disk"}.get(kind, kind)
            yield Finding(kind, f"{name}: sessions hold {use.owned_bytes / use.total_bytes:.0%} of it")


def _recomputed(sessions: Collection[Session], owner: str | None) -> Iterator[Finding]:
    """What last turns of the last minutes had to compute again."""
    recent = [each for each in sessions if time.time() - each.used_at < RECENT_S and each.usage.last is not None]
    lost = {each: each.usage.last.tokens_recomputed for each in recent if each.usage.last is not None}
    if sum(lost.values()):
        worst = sorted((each for each in lost if lost[each]), key=lost.__getitem__, reverse=True)
        text = f"{counted(lost[worst[0]], 'token')} of {_called(worst[0], owner)} recomputed: no tier had kept them"
        yield Finding("recomputed", text, _ids(worst))


def _most_at_once(places: float, share: float) -> float:
    """Of how many agents that work that share of the time, each by itself, there are seldom more at work than places:
    two standard deviations of the binomial distribution above its mean.
    """
    spread = 2 * math.sqrt(share * (1 - share))
    return ((math.sqrt(spread**2 + 4 * share * places) - spread) / (2 * share)) ** 2


def _held(session: Session) -> int:
    """Bytes of its KV. A copy does not make it larger."""
    kv = session.kv
    return max(kv.device_bytes, kv.host_bytes, kv.disk_bytes)


def _called(session: Session, reader: str | None) -> str:
    """What its client calls it and the end of its id, or its tenant: no other tenant reads a client's text."""
    if session.owner != reader:
        return f"session …{session.id[-8:]} of tenant {session.owner}"
    name = session.metadata.get("name") or next(iter(session.metadata.values()), "")
    return f"{name} (…{session.id[-8:]})" if name else f"session …{session.id[-8:]}"


def _ids(sessions: Iterable[Session]) -> tuple[SessionId, ...]:
    return tuple(each.id for each in sessions)[:MOST_SESSIONS]


def _span(seconds: float) -> str:
    """ "7 s", "3 min", "2 h", "5 days"."""
    units = ((2 * 86_400, 86_400, "days"), (7200, 3600, "h"), (120, 60, "min"))
    unit, word = next(((unit, word) for least, unit, word in units if seconds >= least), (1, "s"))
    return f"{seconds / unit:.0f} {word}"
