"""Whose a replica's name is. A start claims the name for its journal, and is refused with one that is not the newest.

The store has, for each name, the journal's UUID, how often it was started in the cluster, and how many sessions have
left or come. Each start replaces what the last one has written, so a folder that is empty, old or copied is found out
before anything of it is served. `docs/design/moves.md` says what that is good for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from app.cluster.key import ClusterKey
from app.cluster.load import Load
from app.cluster.store import FLEET, JOURNAL, MEMBER, TOMB, Store
from app.domain.errors import DirectoryAway, FieldOutOfRange

logger = logging.getLogger(__name__)

LOOK_S, AGAIN_S = 0.2, 1.0
"""Between two looks at a replica that may be dead, and two attempts to reach a store that is away."""
PATIENCE_S = 9.0
"""How long is waited for a replica that may be dead to be gone: one and a half of its leases."""
SAY_AGAIN_S = 60.0
"""Between two lines of the log about a start that waits."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself."""

    name: str
    url: str
    """Where the others reach it, without a slash at its end."""
    journal: str
    """The UUID of its journal."""
    proof: str = ""
    """Signs these three with the cluster's key: see `proven`."""
    place: str = ""
    """The journal's file on this machine, since that was started; empty where the system does not tell."""
    role: str = "both"
    ready: bool = False
    """Whether it takes new work."""
    left: bool = False
    """Whether it ends, and all its sessions have gone to others."""
    load: Load | None = None


def proven(member: Member, key: ClusterKey) -> Member:
    """The same with a proof that it has the key. Clients' requests and their keys go where an entry of the store says:
    one without the proof is of a server with another key, or of somebody who can write there.
    """
    return replace(member, proof=key.sign(*_stated(member)))


def is_proven(member: Member, key: ClusterKey) -> bool:
    """Whether it has the key."""
    return key.has_signed(member.proof, *_stated(member))


def _stated(member: Member) -> tuple[bytes, ...]:
    return (b"member", member.name.encode(), member.url.encode(), member.journal.encode())


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The journal that a replica's name belongs to."""

    journal: str
    start: int
    """How often the journal has been started in the cluster, orderly ends included. A copy has an older number."""
    attempt: str
    """A word that the journal had before it was started: one whose answer was lost knows by it that it has started."""
    moves: int = 0
    """Changes of homes that the journal has seen, at least."""
    file: int = 0
    """The number of the journal's file on its disk: a copy has another."""
    ended: bool = False
    """Whether its last server has ended in order."""
    left: bool = False
    """Whether no session was there at that end."""


T = TypeVar("T", Member, Record)


def encode(value: Member | Record) -> str:
    """As the store has it."""
    return msgspec.json.encode(value).decode()


def decode(kind: type[T], text: str) -> T:
    """What the store has. Raises `DirectoryAway` for what cannot be read: it may mean anything."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise DirectoryAway(f"the cluster's store has an entry of another version: {error}") from error


@dataclass(frozen=True, slots=True)
class Roster:
    """What the store has about replicas, at one moment."""

    members: Mapping[str, Member]
    records: Mapping[str, Record]
    texts: Mapping[str, str]
    """The records as the store has them."""
    tombs: frozenset[str]
    """Journals that have been given up for good."""

    @classmethod
    async def read(cls, store: Store) -> Roster:
        """Raises `DirectoryAway`."""
        found = await store.read_all(FLEET)

        def below(prefix: str) -> dict[str, str]:
            return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}

        members, texts = below(MEMBER), below(JOURNAL)
        return cls(
            members={name: decode(Member, text) for name, text in members.items()},
            records={name: decode(Record, text) for name, text in texts.items()},
            texts=texts,
            tombs=frozenset(below(TOMB)),
        )


async def claim(store: Store, name: str, mine: Record, place: str, key: ClusterKey) -> None:
    """Have the name belong to this start of a journal, whose folder this process holds. Waits while the store is away,
    and for the leases of a replica of that name, and of replicas with another cluster key, that may be dead.

    Raises `FieldOutOfRange` if the name is another journal's, if this journal is older than the name's or a copy of it,
    or if a replica of that name or with another key lives.
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
            stranger = next((each for each in roster.members.values() if not is_proven(each, key)), None)
            # This process has the folder's lock: whoever had this very file on this machine is dead.
            if stranger is None and (other is None or (place and other.place == place)):
                if is_mine:
                    return
                await store.swap(entry, roster.texts.get(name), encode(mine))
                continue  # look again: the former server may have come back meanwhile, and goes when it sees this
            if stranger is not None and time.monotonic() - waits_since > PATIENCE_S:
                raise FieldOutOfRange(
                    f"cluster_key_file: {stranger.name} at {stranger.url} has another key or another version of Djinn. "
                    "All replicas need the same; another cluster needs another store or prefix",
                    param="cluster_key_file",
                )
            if other is not None and not is_mine and time.monotonic() - waits_since > PATIENCE_S:
                raise FieldOutOfRange(
                    f"replica: {name} runs already, at {other.url}: end it first. This folder may be a copy of its own",
                    param="replica",
                )
            await asyncio.sleep(LOOK_S)
        except DirectoryAway as error:
            waits_since = time.monotonic()
            if waits_since - told_at >= SAY_AGAIN_S:
                told_at = waits_since
                logger.warning("%s: the start waits for it", error.message)
            await asyncio.sleep(AGAIN_S)


def _require_free(name: str, found: Record | None, mine: Record, tombs: frozenset[str], shown: str) -> None:
    """Raise `FieldOutOfRange` if the name cannot go on with this journal."""
    why = None
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
    if why is not None:
        raise FieldOutOfRange(f"replica: {why}", param="replica")


async def forget(store: Store, name: str) -> str:
    """Give up the journal of a replica that is gone for good: its sessions are lost, and the name is free again.
    Returns the journal's UUID. Raises `FieldOutOfRange` if the name is unknown, or its replica lives, `DirectoryAway`.
    """
    record, text = await _of_the_dead(store, name)
    await store.write(f"{TOMB}{record.journal}", name)  # first: the journal must not find its name free
    await _replace(store, name, text, None)
    return record.journal


async def declare_ended(store: Store, name: str) -> None:
    """Say of a replica that its server is dead, so that a copy of its folder may go on. Raises like `forget`."""
    record, text = await _of_the_dead(store, name)
    await _replace(store, name, text, encode(replace(record, ended=True)))


async def _of_the_dead(store: Store, name: str) -> tuple[Record, str]:
    since = time.monotonic()
    while (found := (roster := await Roster.read(store)).members.get(name)) is not None:
        if time.monotonic() - since > PATIENCE_S:
            raise FieldOutOfRange(f"{name} lives, at {found.url}: end it first", param="name")
        await asyncio.sleep(LOOK_S)
    if (record := roster.records.get(name)) is None:
        known = ", ".join(sorted(roster.records)) or "none"
        raise FieldOutOfRange(f"the cluster knows no replica {name[:40]!r}; it knows: {known}", param="name")
    return record, roster.texts[name]


async def _replace(store: Store, name: str, before: str, after: str | None) -> None:
    if not await store.swap(f"{JOURNAL}{name}", before, after):
        raise FieldOutOfRange(f"{name} has been started meanwhile", param="name")
