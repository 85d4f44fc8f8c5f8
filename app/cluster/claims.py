"""Which journal a replica's name belongs to.

A replica claims its name when it starts, and only the newest journal of that name may. So an empty, old or copied
folder is refused before anything in it is served. `docs/design/moves.md` says why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Container, Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from app.cluster.key import ClusterKey
from app.cluster.store import FLEET, JOURNAL, MEMBER, TOMB, FolderStore, Store, refusal
from app.domain.errors import DirectoryAway, FieldOutOfRange
from app.domain.memory_map import MemoryMap

logger = logging.getLogger(__name__)
LOOK_S, AGAIN_S = 0.2, 1.0
"""Between two looks at a replica that may be dead, and between two attempts to reach the store."""
PATIENCE_S = 9.0
"""How long a start waits for the lease of a replica that may be dead: one and a half leases."""
SAY_AGAIN_S = 60.0


def open_store(text: str) -> Store:
    """The store at the address of `--cluster`. Raises `FieldOutOfRange` for a malformed address."""
    from app.cluster.etcd import SCHEMES, EtcdStore  # httpx takes a moment to import

    scheme, _, rest = text.partition(":")
    if scheme == "folder" and rest:
        return FolderStore(rest)
    if scheme in SCHEMES:
        return EtcdStore(text)
    raise refusal(f"must be etcd://HOST:PORT, etcds://HOST:PORT or folder:PATH; got {text[:20]!r}")


class Load(msgspec.Struct, frozen=True):
    """The free parts, 0 to 1, of the device's KV and of host memory for KV, and how many turns run or wait."""

    kv_free: float
    turns: int
    host_free: float = 0.0

    @classmethod
    def measured(cls, memory: MemoryMap) -> Load:
        """The load of an engine with this memory."""
        free = 1 - memory.device.owned_bytes / max(1, memory.device.total_bytes)
        host = memory.host
        host_free = 1 - host.owned_bytes / host.total_bytes if host.total_bytes else 0.0
        return cls(round(free, 4), memory.running + memory.waiting, round(host_free, 4))


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself. Others reach it at `url`, without a slash at its end. `journal` is its journal's
    UUID, and `place` identifies the journal's file on this machine until that restarts (empty: it has no such id).
    """

    name: str
    url: str
    journal: str
    proof: str = ""
    """Signs these three with the cluster's key: clients' keys go to that URL, so an entry without it is ignored."""
    place: str = ""
    role: str = "both"
    ready: bool = False
    """Whether it takes new work."""
    left: bool = False
    """Whether it ends with nothing left: all its sessions have gone to others, and no tenant has files there."""
    load: Load = Load(0.0, 0)
    """Before its first measurement it counts as full."""

    def proven(self, key: ClusterKey) -> Member:
        """The same member with a proof that it has the cluster's key."""
        return replace(self, proof=key.sign(*self._stated))

    def is_proven(self, key: ClusterKey) -> bool:
        """Whether the member has proved that it has the key."""
        return key.has_signed(self.proof, *self._stated)

    @property
    def _stated(self) -> tuple[bytes, ...]:
        return (b"member", self.name.encode(), self.url.encode(), self.journal.encode())


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The journal that a replica's name belongs to.

    `start` is how often the journal has been started in the cluster, orderly ends included, and `moves` how many
    changes of homes it has seen at least: a copy has smaller numbers. `file` is the number of its file on its disk: a
    copy has another. `attempt` is a word that was written to the journal before the claim: a replica that lost the
    store's answer finds by it that its claim was taken. `ended`: its last server has ended in order; `left`: no session
    and no file was there at that end.
    """

    journal: str
    start: int
    attempt: str
    moves: int = 0
    file: int = 0
    ended: bool = False
    left: bool = False


T = TypeVar("T", Member, Record)


def encode(value: Member | Record) -> str:
    """The value as JSON."""
    return msgspec.json.encode(value).decode()


def decode(kind: type[T], text: str) -> T:
    """Read a value. Raises `DirectoryAway` if it cannot be read: it tells nothing."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise DirectoryAway(f"the cluster's store has an entry of another version: {error}") from error


class Roster:
    """All that the store knows about replicas, at one moment."""

    def __init__(self, found: Mapping[str, str]) -> None:
        """`found`: the entries under `FLEET`. Raises `DirectoryAway` if an entry cannot be parsed."""

        def below(prefix: str) -> dict[str, str]:
            return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}

        self.members = {name: decode(Member, text) for name, text in below(MEMBER).items()}
        self.texts = below(JOURNAL)
        """The records as JSON, by name."""
        self.records = {name: decode(Record, text) for name, text in self.texts.items()}
        self.tombs = below(TOMB)
        """Journals that have been given up for good."""

    @classmethod
    async def read(cls, store: Store) -> Roster:
        """Raises `DirectoryAway`."""
        return cls(await store.read_all(FLEET))


async def claim(store: Store, name: str, mine: Record, place: str, key: ClusterKey) -> None:
    """Claim the name for this start of a journal, whose folder this process has locked.

    Waits while the store is away, and for the leases of replicas that may be dead: one with this name, and those with
    another cluster key. Raises `FieldOutOfRange` if the name belongs to another journal, if this journal is older than
    the name's or a copy of it, or if a replica with this name or with another key is alive.
    """
    entry = f"{JOURNAL}{name}"
    waits_since, told_at = time.monotonic(), -SAY_AGAIN_S
    while True:
        try:
            roster = await Roster.read(store)
            before, other = roster.records.get(name), roster.members.get(name)
            is_mine = before is not None and before.attempt == mine.attempt
            if not is_mine:
                _require_free(name, before, mine, roster.tombs, store.shown)
            stranger = next((each for each in roster.members.values() if not each.is_proven(key)), None)
            # This process has the folder's lock: whoever had this very file on this machine is dead.
            if stranger is None and (other is None or (place and other.place == place)):
                if is_mine:
                    return
                await store.swap(entry, roster.texts.get(name), encode(mine))
                continue  # look again: the former server may have come back meanwhile, and goes when it sees this
            is_late = time.monotonic() - waits_since > PATIENCE_S
            if stranger is not None and is_late:
                raise refusal(
                    f"{stranger.name} at {stranger.url} has another key or another version of Djinn. All replicas need "
                    "the same; another cluster needs another store or prefix",
                    "cluster_key_file",
                )
            if other is not None and not is_mine and is_late:
                where = f"{name} runs already, at {other.url}"
                raise refusal(f"{where}: end it first. This folder may be a copy of that server's", "replica")
            await asyncio.sleep(LOOK_S)
        except DirectoryAway as error:
            waits_since = time.monotonic()
            if waits_since - told_at >= SAY_AGAIN_S:
                told_at = waits_since
                logger.warning("%s: the start waits for it", error.message)
            await asyncio.sleep(AGAIN_S)


def _require_free(name: str, found: Record | None, mine: Record, tombs: Container[str], shown: str) -> None:
    """Raise `FieldOutOfRange` if the name cannot go on with this journal."""
    if mine.journal in tombs:
        why = (
            f"the journal in this folder ({mine.journal}) was given up by djinn cluster forget; start {name} with an "
            "empty --state-dir, or serve this folder without --cluster to export its sessions"
        )
    elif found is None:
        return
    elif found.journal != mine.journal:
        why = (
            f"{name} has another journal ({found.journal}) than this folder ({mine.journal}): is its volume mounted? "
            f"If that one is lost for good: djinn cluster forget {name} --cluster {shown}"
        )
    elif found.start >= mine.start or found.moves > mine.moves:
        why = (
            f"this folder is an older copy of the one that {name} has had since: start {mine.start} and "
            f"{mine.moves} moves of sessions here, {found.start} and {found.moves} there. Use that one. If it is lost "
            f"for good: djinn cluster forget {name} --cluster {shown}, and an empty --state-dir"
        )
    elif not found.ended and found.file != mine.file:
        why = (
            f"this folder is a copy of the one of {name}, which has not ended in order. If that server is dead for "
            f"good: djinn cluster ended {name} --cluster {shown}"
        )
    else:
        return
    raise refusal(why, "replica")


async def declare_dead(store: Store, name: str, *, is_lost: bool) -> str:
    """Record that a replica's server is dead, so that a copy of its folder may be started. `is_lost`: no server can
    start with its journal any more, so its sessions are lost, and the name is free again. Returns the journal's UUID.
    Raises `FieldOutOfRange` if the name is unknown, or its replica lives, and `DirectoryAway`.
    """
    since = time.monotonic()
    while (found := (roster := await Roster.read(store)).members.get(name)) is not None:
        if time.monotonic() - since > PATIENCE_S:
            raise FieldOutOfRange(f"{name} lives, at {found.url}: end it first", param="name")
        await asyncio.sleep(LOOK_S)
    if (record := roster.records.get(name)) is None:
        known = ", ".join(sorted(roster.records)) or "none"
        raise FieldOutOfRange(f"the cluster knows no replica {name[:40]!r}; it knows: {known}", param="name")
    if is_lost:
        await store.write(f"{TOMB}{record.journal}", name)  # first: the journal must not find its name free
    after = None if is_lost else encode(replace(record, ended=True))
    if not await store.swap(f"{JOURNAL}{name}", roster.texts[name], after):
        raise FieldOutOfRange(f"{name} has been started meanwhile", param="name")
    return record.journal
