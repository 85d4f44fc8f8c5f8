"""What the journal is told: how a session is now, what its history is from some position on, and what goes with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter

from app.domain.activations import Dictionary, StoredProbe, Translators, Upload, UploadKey, UploadKind
from app.domain.breakpoints import Breakpoint, Intervention, Swap, swapped
from app.domain.homes import Home
from app.domain.values import FinishReason, Phase, Residency, SessionId, TurnUsage


@dataclass(frozen=True, slots=True)
class Identity:
    """Which journal it is. A copy has the same `uuid`, and fewer `starts` in clusters than the one in use."""

    uuid: str
    starts: int
    """Starts in a cluster, and orderly ends of those."""
    attempt: str = ""
    """A word that the next start has, until it has been counted."""


@dataclass(frozen=True, slots=True)
class Steering:
    """The breakpoints that are armed, and the interventions that the history was computed with."""

    breakpoints: tuple[Breakpoint, ...] = ()
    interventions: tuple[Intervention, ...] = ()


NO_STEERING = Steering()


@dataclass(frozen=True, slots=True)
class InterventionChange:
    """A session has `count` interventions now; `rows` are those of them that are new or changed, by their place."""

    count: int
    rows: Mapping[int, Intervention]

    @classmethod
    def between(cls, before: tuple[Intervention, ...], after: tuple[Intervention, ...]) -> InterventionChange | None:
        """What makes `after` of `before`; None if they are the same."""
        if after is before:
            return None
        rows = {
            number: made
            for number, made in enumerate(after)
            if number >= len(before) or (made is not before[number] and made != before[number])
        }
        return cls(len(after), rows) if rows or len(after) != len(before) else None

    def then(self, later: InterventionChange) -> InterventionChange:
        """This change and a later one of the same session, as one."""
        rows = {**self.rows, **later.rows}
        return InterventionChange(later.count, {number: made for number, made in rows.items() if number < later.count})


T = TypeVar("T", Breakpoint, Intervention)
_CONFIG = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")
_FORMS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(tuple[kind, ...], config=_CONFIG)  # type: ignore[valid-type]
    for kind in (Breakpoint, Intervention)
}


def to_json(kind: type[T], values: Iterable[T], swap: Swap) -> str:
    """Breakpoints or interventions as text; `swap` takes the data of each vector and gives its digest."""
    return _FORMS[kind].dump_json(tuple(swapped(each, swap) for each in values)).decode()


def from_json(kind: type[T], text: str, swap: Swap) -> tuple[T, ...]:
    """What `to_json` wrote; `swap` goes the way back. Raises `ValueError` for anything else."""
    return tuple(swapped(each, swap) for each in _FORMS[kind].validate_json(text))


UPLOADS: dict[UploadKind, TypeAdapter[Any]] = {
    UploadKind.DICTIONARY: TypeAdapter(Dictionary),
    UploadKind.LENS: TypeAdapter(Translators),
    UploadKind.PROBE: TypeAdapter(StoredProbe),
}
"""What an upload with a file is, as text."""
TOKEN_BYTES = 4
"""A token id is an unsigned 32-bit integer in the machine's byte order: an item of `array("I")`."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session without its history. `metadata` and `usage` are JSON; `name` is what `X-Session-ID` calls it.

    `forked_from` had `forked_tokens` tokens when this session was made of it. KV is shared within `namespace`; None:
    with the owner's other sessions. `adapter` is the name of the LoRA adapter that the history is computed with; None:
    there is none.
    """

    id: SessionId
    owner: str | None
    name: str | None
    metadata: str
    ttl_s: int | None
    residency: Residency
    phase: Phase
    created_at: float
    used_at: float
    usage: str
    forked_from: SessionId | None = None
    forked_tokens: int | None = None
    namespace: str | None = None
    adapter: str | None = None
    adapter_digest: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A response that a session has generated, which goes when the session does. `body` is JSON, in UTF-8."""

    id: str
    session: SessionId
    body: bytes


@dataclass(frozen=True, slots=True)
class DoneTurn:
    """What a turn has generated, and how it ended."""

    token_ids: tuple[int, ...]
    reason: FinishReason
    usage: TurnUsage


@dataclass(frozen=True, slots=True)
class KeyedRecord:
    """A request with an `Idempotency-Key` that has been done: it has opened `session`, or has had `turn` in it.

    `digest` is that of the request, `at` is when it came, in Unix seconds. `response` is the id of the response that
    the turn was for.
    """

    owner: str | None
    key: str
    digest: bytes
    at: float
    session: SessionId
    response: str | None = None
    turn: DoneTurn | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """The session is `record` now, and its history from `position` on is `token_ids`, whatever stood there before.

    `breakpoints` and `interventions` are None if they are as they were. `home` is None unless it moves. `responses` are
    those that a session has brought from another server: they are written with it, or not at all. So are the `keyed`
    requests that have made the change.
    """

    record: SessionRecord
    position: int
    token_ids: bytes
    breakpoints: tuple[Breakpoint, ...] | None = None
    interventions: InterventionChange | None = None
    home: Home | None = None
    responses: tuple[ResponseRecord, ...] = ()
    keyed: tuple[KeyedRecord, ...] = ()

    def then(self, later: Change) -> Change:
        """This change and a later one of the same session, as one."""
        breakpoints = self.breakpoints if later.breakpoints is None else later.breakpoints
        interventions = self.interventions
        if later.interventions is not None:
            interventions = later.interventions if interventions is None else interventions.then(later.interventions)
        position, token_ids = later.position, later.token_ids
        if position > self.position:
            token_ids = self.token_ids[: (position - self.position) * TOKEN_BYTES] + token_ids
            position = self.position
        home, responses = later.home or self.home, later.responses or self.responses
        keyed = self.keyed + later.keyed
        return Change(later.record, position, token_ids, breakpoints, interventions, home, responses, keyed)


@dataclass(frozen=True, slots=True)
class Departed:
    """The session is at home elsewhere: nothing of it is left here but this, or not even this. `responses` are the ids
    of those that have gone with it.
    """

    home: Home | None
    responses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResponseKey:
    """A response of that id."""

    id: str


Key = SessionId | UploadKey | ResponseKey
Entry = Change | Departed | Upload | ResponseRecord | None
"""What is new about a session, an upload or a response; None: it is gone."""
WriteBatch = dict[Key, Entry]
"""What is to be written."""


def describe(key: Key) -> str:
    """What a line of the log calls it. An upload's name and its owner's are their own words, which no log has."""
    match key:
        case UploadKey():
            return f"a {key.kind}"
        case ResponseKey():
            return f"response {key.id}"
        case _:
            return f"session {key}"


def moves(entry: Entry) -> bool:
    """Whether it is about a session that goes to another server, or comes from one."""
    return isinstance(entry, Departed) or (isinstance(entry, Change) and entry.home is not None)


def add_to(batch: WriteBatch, key: Key, entry: Entry) -> None:
    """Put what happened to `key` after all that is in `batch`."""
    earlier = batch.get(key)
    if isinstance(earlier, Change) and isinstance(entry, Change):
        entry = earlier.then(entry)
    batch[key] = entry
