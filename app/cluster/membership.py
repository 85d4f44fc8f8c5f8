"""This replica's part in the cluster: it announces itself, sees the others, and knows where things are."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import Self

from msgspec.structs import replace

from app.cluster.claims import Load, Member, Record, Roster, claim, decode, encode, open_store
from app.cluster.key import ClusterKey
from app.cluster.store import FLEET, JOURNAL, MEMBER, PLACE, TOMB, Store
from app.domain.errors import DirectoryAway, Fenced, WrongState
from app.journal.journal import Journal
from app.machine.memory import boot_time, machine_id
from app.settings import Settings
from app.settings.settings import CLUSTER_LEASE_S

logger = logging.getLogger(__name__)
LEASE_S = 6.0
"""How long a silent replica still counts as present."""
FENCE_S = CLUSTER_LEASE_S
"""A process that has slept for this long asks the store before it serves its sessions again."""
SAY_S = 1.0
"""Between two renewals."""
LOOK_S, LONGEST_LOOK_S = 0.2, 2.0
"""Between two looks at the others, at least and at most."""
DAY_S = 24 * 3600.0
FORGET_DAYS = 31
"""A place that was not used for longer is forgotten: sessions close after 30 days without a turn."""
PAGE = 1000
"""Places that are read at once."""


def id_key(named: str) -> str:
    """The key of a session, or of a response or conversation, that is not where its id says."""
    return f"{'session' if named.startswith('ses_') else 'response'} {named}"


def name_key(owner: str | None, name: str) -> str:
    """The key of a session that the owner's calls name by `X-Session-ID`."""
    return f"name {owner or ''} {name}"


def files_key(owner: str | None) -> str:
    """The key of all files and batches of the owner, which are at one replica."""
    return f"files {owner or ''}"


def _used_today(replica: str) -> str:
    """The entry of a place: its replica, and the day of its last use, in days since 1970."""
    return f"{replica} {int(time.time() // DAY_S)}"


class Membership:
    """`async with` it to take part in the cluster. Used on one event loop."""

    def __init__(
        self, store: Store, me: Member, record: Record, key: ClusterKey, may_serve: Callable[[], bool] = lambda: True
    ) -> None:
        """`record` is what `claim` has written to the store. Replicas without the `key` are ignored. While `may_serve`
        is false, as the folder's lease has run out, this replica does not announce itself.
        """
        self.name = me.name
        self.members: Mapping[str, Member] = MappingProxyType({})
        """Replicas that are present, by name, with this one. While the store is away, those that were there last."""
        self.known: frozenset[str] = frozenset({me.name})
        """Names of all replicas that may have sessions, present or not."""
        self.is_away = False
        """Whether the store does not answer."""
        self.is_lost = False
        """Whether the name belongs to another start or journal now: this process must end."""
        self.buried: Mapping[str, str] = {}
        """Journals that have been given up, and the names of their replicas."""
        self.renewed: Set[str] = frozenset()
        """Those names. Another journal may have one by now, which does not know what has left the first."""
        self.held: Callable[[], Iterable[str]] = lambda: ()
        """Yields the keys of all that is here and that the store must know. It gets them again if it loses its data."""
        self._store, self._key, self._may_serve = store, key, may_serve
        self._me = me.proven(key)
        self._strangers = set[str]()
        self._record = record
        self._text: str | None = encode(record)
        """The record as the store has it, as far as is known; None: it has none."""
        self._news, self._changed, self._lacks_places = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._recording = asyncio.Lock()
        self._sure_at = boot_time()
        """When this replica last held the name for certain."""
        self._back_at = -LEASE_S
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Join the cluster."""
        self._sure_at = boot_time()
        self._tasks = [asyncio.create_task(self._for_ever(step)) for step in (self._keep, self._follow, self._tend)]
        with suppress(TimeoutError):  # a store that is away is no reason not to serve
            async with asyncio.timeout(LEASE_S):
                while self.name not in self.members and not self.is_lost:
                    await self.changed()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave the cluster."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        with suppress(DirectoryAway):
            await self._store.take_back(f"{MEMBER}{self.name}")

    @classmethod
    def join(cls, settings: Settings, journal: Journal, moves: int, key: ClusterKey) -> Self:
        """Claim the settings' name for the journal, which is loaded and not started. `moves` is how many changes of
        homes it has seen. Call this outside of an event loop. Raises what `claim` and `open_store` raise.
        """
        assert settings.cluster is not None
        assert settings.replica is not None
        address, name, mine = settings.cluster, settings.replica, journal.begin_start()
        file, lease = journal.path.stat(), journal.lease
        record = Record(journal=mine.uuid, start=mine.starts, attempt=mine.attempt, moves=moves, file=file.st_ino)
        place = f"{machine_id()} {file.st_dev}:{file.st_ino}" if machine_id() else ""
        me = Member(name=name, url=settings.url, journal=mine.uuid, place=place, role=settings.role)

        async def claimed() -> None:
            async with aclosing(open_store(address)) as store:
                await claim(store, name, record, place, key)

        asyncio.run(claimed())
        journal.count_start()
        return cls(open_store(address), me, record, key, lambda: lease is None or lease.holds)

    async def end(self, start: int | None) -> None:
        """Record that the server has ended in order, and close the store. `start` is the number with which its journal
        was closed; None if it was not. If that cannot be recorded, the next start needs the same file.
        """
        with suppress(DirectoryAway):
            if start is not None and not self.is_lost:
                await self.note(start=start, ended=True, left=self._me.left)
        await self._store.aclose()

    def say(self, *, ready: bool, left: bool, load: Load | None) -> None:
        """Announce this from now on. A load goes out once a second at most, the others at once."""
        before, self._me = self._me, replace(self._me, ready=ready, left=left, load=load or self._me.load)
        if (ready, left) != (before.ready, before.left):
            self._news.set()

    def require(self) -> None:
        """Raise `Fenced` if another server may have the name by now. None can claim it while the store is away."""
        if not self.holds:
            why = "another one has its name" if self.is_lost else "it has slept for too long to know"
            raise Fenced(f"this server may not be {self.name} of its cluster any more: {why}")

    @property
    def holds(self) -> bool:
        """Whether the cluster lets this server serve its sessions now."""
        return not self.is_lost and boot_time() - self._sure_at < FENCE_S

    async def changed(self) -> None:
        """Return when a replica comes, goes or announces something, or when the store comes or goes."""
        await self._changed.wait()

    async def find(self, key: str) -> str | None:
        """The replica of that key; None if there is none. Raises `DirectoryAway`, as do all methods below."""
        text = await self._store.read(f"{PLACE}{key}")
        if text is None:
            return None
        replica = text.split()[0]
        if text != (now := _used_today(replica)):
            await self._store.swap(f"{PLACE}{key}", text, now)
        return replica

    async def swap(self, key: str, old: str | None, new: str) -> str:
        """Set the key to `new` if it is `old` or not set. Returns its value then: of several at once, one wins."""
        before = None
        while not await self._store.swap(f"{PLACE}{key}", before, _used_today(new)):
            before = await self._store.read(f"{PLACE}{key}")
            if before is not None and (found := before.split()[0]) != old:
                return (await self.find(key)) or found
        return new

    async def put(self, key: str, replica: str) -> None:
        """Set the replica of a key."""
        await self._store.write(f"{PLACE}{key}", _used_today(replica))

    async def note(self, *, start: int = 0, moves: int = 0, ended: bool = False, left: bool = False) -> None:
        """Raise the numbers of the record, so that older copies of the folder are refused. `moves` is how many changes
        of homes the journal has seen: it is recorded when a session's departure is flushed, before it leaves. Raises
        `DirectoryAway`: then it may not leave.
        """
        key = f"{JOURNAL}{self.name}"
        async with self._recording:
            while True:
                record, before = self._record, self._text
                numbers = {"start": max(record.start, start), "moves": max(record.moves, moves)}
                after = replace(record, ended=ended, left=left, **numbers)
                if after == record and before is not None:
                    return
                if await self._store.swap(key, before, encode(after)):
                    self._record, self._text = after, encode(after)
                    if before is None:
                        logger.warning("the cluster's store had lost what it knew of %s, and has it again", self.name)
                        self._lacks_places.set()
                    return
                text = await self._store.read(key)
                found = record if text is None else decode(Record, text)
                if found.attempt != record.attempt:
                    raise DirectoryAway(f"the cluster's store has no record of {self.name} any more")
                self._record, self._text = found, text  # an attempt whose answer was lost, or an operator's word

    async def bury(self, journal: str, name: str) -> None:
        """Forbid a replica's journal to all servers. Raises `DirectoryAway`; `WrongState` if one with it lives."""
        roster = await Roster.read(self._store)
        for each in roster.members.values():
            if each.journal == journal:
                raise WrongState(f"{each.name} at {each.url} has the journal {journal}, and lives")
        await self._store.write(f"{TOMB}{journal}", name)

    async def _for_ever(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except DirectoryAway as error:
                if not self.is_away:
                    self.is_away = True
                    logger.warning("%s: known sessions go on, new names wait", error.message)
                    self._tell()
            except Exception:  # a store may hold anything, and the lease must be renewed all the same
                logger.exception("the cluster's store gave what was not expected")
            await asyncio.sleep(LOOK_S)

    async def _keep(self) -> None:
        """Renew the lease, with the latest announcement."""
        self._news.clear()
        began, key = boot_time(), f"{MEMBER}{self.name}"
        try:
            if self.is_lost or not self._may_serve():
                await self._store.take_back(key)
            elif not await self._store.lend(key, encode(self._me), LEASE_S):
                await self._look()  # another server may have had the name meanwhile
        except DirectoryAway:
            self._sure_at = began  # for others too: none can take the name
            raise
        if not self.is_lost:
            self._sure_at = began
        with suppress(TimeoutError):
            async with asyncio.timeout(SAY_S):
                await self._news.wait()

    async def _follow(self) -> None:
        """Read the roster whenever anything in it changes."""
        async with aclosing(self._store.watch(FLEET, LONGEST_LOOK_S)) as looks:
            async for _ in looks:
                await self._look()
                await asyncio.sleep(LOOK_S)

    async def _tend(self) -> None:
        """Each day, and when the store has lost its data: write the keys of sessions here, and remove unused ones."""
        self._lacks_places.clear()
        for key in list(self.held()):
            if (other := await self.swap(key, None, self.name)) != self.name:
                logger.error("a key (%s) of what is here is bound to %s", key.split()[0], other)
        after, last = PLACE, time.time() // DAY_S - FORGET_DAYS
        while page := await self._store.read_all(PLACE, after, PAGE):
            after = max(page)
            for key, text in page.items():
                if int(text.split()[1]) < last:
                    await self._store.swap(key, text, None)
        with suppress(TimeoutError):
            async with asyncio.timeout(DAY_S):
                await self._lacks_places.wait()

    async def _look(self) -> None:
        roster = await Roster.read(self._store)
        found, self.buried = roster.records.get(self.name), roster.tombs
        self.renewed = frozenset(self.buried.values())
        now, was_away, was_lost = time.monotonic(), self.is_away, self.is_lost
        if self._record.journal in roster.tombs or (found is not None and found.attempt != self._record.attempt):
            self.is_lost = True
        elif found is None or (found.ended and not self._recording.locked()):
            # The store has lost its data, or an operator took this server to be dead.
            self._record, self._text = found or self._record, roster.texts.get(self.name)
            await self.note()
        if self.is_lost and not was_lost:
            logger.critical("another server has the name %s, or its journal has been given up", self.name)
            self._news.set()
        if was_away:
            self.is_away, self._back_at = False, now
            logger.warning("the cluster's store answers again")
        before, members = self.members, dict[str, Member]()
        # Others have not renewed their leases either while it was away: they are given the time to come back.
        if now < self._back_at + LEASE_S:
            members |= before
        for name, each in roster.members.items():
            if each.name == name and each.is_proven(self._key):
                members[name] = each
            elif name not in self._strangers:
                self._strangers.add(name)
                logger.error("%s at %s lacks the key of this cluster: it gets nothing", name, each.url)
        for name in sorted((members.keys() - before.keys()) - {self.name}):
            logger.info("replica %s is there, at %s", name, members[name].url)
        for name in sorted((before.keys() - members.keys()) - {self.name}):
            logger.warning("replica %s is away", name)
        with_sessions = {name for name, record in roster.records.items() if not (record.ended and record.left)}
        known = frozenset({self.name} | members.keys() | with_sessions)
        if was_away or self.is_lost != was_lost or members != before or known != self.known:
            self.members, self.known = MappingProxyType(members), known
            self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
