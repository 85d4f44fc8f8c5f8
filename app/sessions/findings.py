"""What is wrong with a server, in sentences that an operator reads in ten seconds.

The page, `djinn top` and `GET /v1/findings` all show these.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

from app.domain.errors import DjinnError
from app.domain.memory_map import MemoryMap
from app.domain.values import Phase, SessionId, SessionState, Tier
from app.machine.budget import DiskRoom
from app.machine.files import counted, size
from app.sessions.capacity import SAMPLE_S, Load, RecentCounts, Totals
from app.sessions.session import RecomputeReason, Session
from app.sessions.table import SessionTable
from app.settings import Settings

FindingKind = Literal[
    "unready",
    "replica",
    "killed",
    "restarts",
    "failing",
    "disk",
    "kv_files",
    "waiting",
    "refused",
    "connections",
    "silent",
    "late",
    "late_kv",
    "device",
    "host",
    "kv_disk",
    "dropped",
    "recomputed",
]
"""The gravest first."""

RESTARTS, FAILED, FINISHED, LATE_KV, RESUMED, DROPPED, DISK_FAILURES, CONNECTIONS = (
    "djinn_engine_restarts_total",
    "djinn_turns_failed_total",
    "djinn_turns_finished_total",
    "djinn_kv_late_restores_total",
    "djinn_resumed_first_token_seconds_count",
    "djinn_kv_dropped_total",
    "djinn_kv_disk_failures_total",
    "djinn_connections_refused_total",
)
"""Counters that alerts rest on too: `docker/prometheus/alerts.yml` has the same shares and spans."""
MOST_RESTARTS, FAILING, LATE_RESTORES = 2, 0.05, 0.2
"""Restarts of the engine, and shares of turns, above which there is a finding."""
LEAST_LATE = 5
"""Late restores below this number make no finding."""
COUNT_S = 30.0
"""Between two readings of the counters while no client asks for findings."""

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
QUEUES_KEPT = 5
"""Samples of the queue: a finding that comes and goes could not be read."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence, and whom it is about: `sessions`, the worst first, or a tenant."""

    kind: FindingKind
    text: str
    sessions: tuple[SessionId, ...] = ()
    tenant: str | None = None


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
        totals: Callable[[MemoryMap | None], Totals],
        read_memory: Callable[[], Awaitable[MemoryMap | None]],
    ) -> None:
        """`room` is that of files beside the journal. `was_killed`: the server before this one was, or crashed.
        `require_ready` raises a `DjinnError` while no new work is taken, `away` names the replicas that may have
        sessions and do not answer, `refused` counts each tenant's requests that its limits refused in the last minute.
        `totals` are all that the server has counted, `read_memory` asks the engine for its map.
        """
        self._table, self._replica, self._max_running = table, settings.replica, settings.max_running
        self._back_since = time.time() if was_killed else 0.0
        self._require_ready, self._away, self._refused_to = require_ready, away, refused
        self._recent, self._read_memory = RecentCounts(totals), read_memory
        self.load = Load(table, settings, self._recent)
        folders = [each.expanduser() for each in (settings.state_dir, settings.engine().kv_dir) if each is not None]
        self._disks = {room.beside(folder): folder for folder in reversed(folders)}
        self._queues: deque[Counter[str]] = deque(maxlen=QUEUES_KEPT)
        """Turns in the queue by tenant."""

    async def run(self) -> None:
        """Look at the sessions, again and again. Endless."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)

    async def count(self) -> None:
        """Look at the counters, again and again. Endless."""
        while True:
            self._recent.note(await self._read_memory())
            await asyncio.sleep(COUNT_S)

    def sample(self) -> None:
        """Take the queue and the use of memory into account."""
        self.load.sample()
        waiting = (session.owner or "" for session in self._table if session.state is SessionState.QUEUED)
        self._queues.append(Counter(waiting))

    def tell(self, memory: MemoryMap | None, owner: str | None, *, is_operator: bool) -> list[Finding]:
        """All that this caller may know, the gravest first. An operator, and everybody where there are no tenants,
        hears of the server and of all sessions. `memory`: None while the engine does not tell.
        """
        sees_all = is_operator or owner is None
        self._recent.note(memory)
        sessions = list(self._table if sees_all else self._table.owned_by(owner))
        found = [
            self._server() if sees_all else (),
            self._waiting(sessions, memory) if sees_all else self._waiting_of(owner or ""),
            self._refused(None if sees_all else owner),
            self._counted() if sees_all else (),
            () if memory is None else _silent(sessions, memory, owner),
            _late(sessions, owner),
            _full(memory) if sees_all and memory is not None else (),
            _recomputed(sessions, owner),
        ]
        kinds = get_args(FindingKind)
        prefix = "" if self._replica is None else f"{self._replica}: "
        return [
            each if each.kind == "replica" else Finding(each.kind, prefix + each.text, each.sessions, each.tenant)
            for each in sorted(chain.from_iterable(found), key=lambda each: kinds.index(each.kind))
        ]

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

    def _waiting(self, sessions: Collection[Session], memory: MemoryMap | None) -> Iterator[Finding]:
        """The longest queue of the last seconds, whose it is, and what its first turn waits for."""
        queue = max(self._queues, key=Counter.total, default=Counter[str]())
        if not (total := queue.total()):
            return
        text, (most, count) = f"{counted(total, 'turn')} in the queue", queue.most_common(1)[0]
        why = "" if memory is None else _why_queued(sessions, memory, self._max_running)
        if most and 1 < total < 2 * count:
            yield Finding("waiting", f"{text}, {count} of them of tenant {most}{why}", tenant=most)
        else:
            yield Finding("waiting", text + why)

    def _waiting_of(self, tenant: str) -> Iterator[Finding]:
        """A tenant sees only its own queued turns."""
        if total := max((queue[tenant] for queue in self._queues), default=0):
            yield Finding("waiting", f"{counted(total, 'turn')} in the queue")

    def _counted(self) -> Iterator[Finding]:
        """What alerts fire at, in the same spans."""
        rise = self._recent.rise
        if (restarts := rise(RESTARTS, 900)) > MOST_RESTARTS:
            text = f"the engine was started anew {restarts} times in 15 min"
            yield Finding("restarts", f"{text}: each loses the KV of the device and the host")
        failed, finished = self._recent.by_label(FAILED, 600), rise(FINISHED, 600)
        if failed and failed.total() > FAILING * (failed.total() + finished):
            text = f"{failed.total():.0f} of {counted(int(failed.total()) + finished, 'turn')} failed in 10 min"
            yield Finding("failing", f"{text}, most of them with {failed.most_common(1)[0][0]}")
        if failures := rise(DISK_FAILURES, 900):
            yield Finding("kv_files", f"{counted(failures, 'KV file')} could not be written or read in 15 min")
        if refused := self._recent.by_label(CONNECTIONS, 300):
            cause, count = refused.most_common(1)[0]
            text = f"{counted(int(refused.total()), 'connection')} refused in 5 min"
            yield Finding("connections", f"{text}, {count:.0f} of them as {_CAUSES.get(cause, cause)}")
        late, resumed = rise(LATE_KV, 900), rise(RESUMED, 900)
        if late >= LEAST_LATE and late > LATE_RESTORES * resumed:
            text = f"{late} of {counted(max(late, resumed), 'turn')} that went on with a history in 15 min"
            yield Finding("late_kv", f"{text} found their KV not on the device")
        if dropped := rise(DROPPED, 900):
            text = f"KV of {counted(dropped, 'session')} was dropped in 15 min"
            yield Finding("dropped", f"{text}: no tier had room for it")

    def _refused(self, only: str | None) -> Iterator[Finding]:
        for tenant, count in Counter(self._refused_to()).most_common():
            if only in (None, tenant):
                text = f"tenant {tenant} is at its limits: {counted(count, 'request')} refused in a minute"
                yield Finding("refused", text, tenant=tenant)


_CAUSES = {"address": "one address had too many", "total": "there were too many", "system": "the system had none left"}
"""Why connections are refused, in words."""
_WHY: Mapping[RecomputeReason | None, str] = {
    "dropped": "no tier had room for them",
    "restarted": "the server or its engine was started anew",
    "moved": "they stayed at another server",
    None: "no tier had kept them",
}
"""Why tokens were recomputed, in words."""


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


def _why_queued(sessions: Collection[Session], memory: MemoryMap, max_running: int) -> str:
    """What the turn that waits the longest waits for, if that can be seen from here."""
    waiting = [each for each in sessions if each.state is SessionState.QUEUED]
    if not waiting:
        return ""
    first = min(waiting, key=lambda each: each.used_at)
    holders = [each for each in sessions if each.busy and each is not first and each.kv.device_bytes]
    held = min(sum(each.kv.device_bytes for each in holders), memory.device.owned_bytes)  # they may share blocks
    needs = memory.blocks.of(len(first.history) + 1) * memory.block_bytes
    if first.kv.tier is Tier.TO_DEVICE:
        return "; the KV of the first is on its way to the device"
    if holders and needs > memory.device.total_bytes - held:
        verb = "holds" if len(holders) == 1 else "hold"
        return f"; the first needs {size(needs)}, and {counted(len(holders), 'turn')} {verb} {size(held)} of the device"
    if memory.running >= max_running:
        return f"; {counted(memory.running, 'turn')} run, and a step has no more places"
    return ""


def _late(sessions: Collection[Session], owner: str | None) -> Iterator[Finding]:
    """Who is later than announced. The server guesses low: its guess is off if a wait takes twice as long."""
    now, announced, guessed = time.time(), dict[Session, float](), dict[Session, float]()
    for each in sessions:
        if each.returns_at is None or each.phase is not Phase.IO_WAIT:
            continue
        late_s = now - each.returns_at
        if late_s > LATE_S and not each.is_guess:
            announced[each] = late_s
        elif late_s > max(LATE_S, each.returns_at - each.used_at):
            guessed[each] = late_s
    for late, than in ((announced, "announced"), (guessed, "the server expects of their tools")):
        if late:
            worst = sorted(late, key=late.__getitem__, reverse=True)
            text = f"{counted(len(late), 'client')} later than {than}: {_called(worst[0], owner)} by"
            yield Finding("late", f"{text} {_span(late[worst[0]])}", _ids(worst))


def _recomputed(sessions: Collection[Session], owner: str | None) -> Iterator[Finding]:
    """Tokens that sessions recomputed in their last turns, and why."""
    now = time.time()
    recent = {each: each.usage.last for each in sessions if now - each.used_at < RECENT_S}
    lost = {each: last.tokens_recomputed for each, last in recent.items() if last is not None}
    if worst := sorted((each for each in lost if lost[each]), key=lost.__getitem__, reverse=True):
        first = worst[0]
        text = f"{counted(lost[first], 'token')} of {_called(first, owner)} recomputed"
        yield Finding("recomputed", f"{text}: {_WHY[first.usage.recompute_reason]}", _ids(worst))


def _full(memory: MemoryMap) -> Iterator[Finding]:
    kinds: tuple[FindingKind, ...] = ("device", "host", "kv_disk")
    for kind, use in zip(kinds, (memory.device, memory.host, memory.disk), strict=True):
        if use.total_bytes and use.owned_bytes >= NEARLY_FULL * use.total_bytes:
            name = {"host": "host memory", "kv_disk": "KV on disk"}.get(kind, kind)
            yield Finding(kind, f"{name}: sessions hold {use.owned_bytes / use.total_bytes:.0%} of it")


def _called(session: Session, reader: str | None) -> str:
    """What its client calls it and the end of its id, or its tenant: no other tenant reads a client's text."""
    if session.owner != reader:
        return f"session …{session.id[-8:]} of tenant {session.owner}"
    return f"{session.label} (…{session.id[-8:]})" if session.label else f"session …{session.id[-8:]}"


def _ids(sessions: Iterable[Session]) -> tuple[SessionId, ...]:
    return tuple(each.id for each in sessions)[:MOST_SESSIONS]


def _span(seconds: float) -> str:
    """ "7 s", "3 min", "2 h", "5 days"."""
    units = ((2 * 86_400, 86_400, "days"), (7200, 3600, "h"), (120, 60, "min"))
    unit, word = next(((unit, word) for least, unit, word in units if seconds >= least), (1, "s"))
    return f"{seconds / unit:.0f} {word}"
