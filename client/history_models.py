"""What sessions and the server did, as the server remembers it for 30 days, and what is wrong now."""

from typing import Literal

from client.answer import Answer


class Finding(Answer):
    """One sentence that an operator should know, and whom it is about: `sessions`, the worst first, or a `tenant`."""

    kind: str
    """`unready`, `replica`, `killed`, `disk`, `waiting`, `refused`, `silent`, `late`, `device`, `host`, `kv_disk`,
    `recomputed`.
    """
    text: str
    sessions: tuple[str, ...]
    tenant: str | None


class Capacity(Answer):
    """How many `more` agents like those of the last two minutes have room, by an estimate, and in words why no more."""

    more: int
    text: str


class Findings(Answer):
    """What is wrong, the gravest first. `capacity` is for operators; None also where no agent has done anything."""

    data: tuple[Finding, ...]
    capacity: Capacity | None


class TimelineEntry(Answer):
    """What happened to a session `at` that time, in Unix seconds. Fields that the kind does not have are None.

    A `turn` has its tokens, what its first token waited for, and `seconds` from the queue to its end. `late_s` is how
    much later it began than a signal had said; below 0 it was early.
    """

    id: int
    at: float
    kind: str
    """`opened`, `restored`, `arrived`, `turn`, `paused`, `resumed`, `phase`, `moved`, `departed` or `closed`."""
    tokens: int | None = None
    status: Literal["finished", "failed"] | None = None
    finish_reason: str | None = None
    code: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_recomputed: int | None = None
    queue_ms: float | None = None
    restore_ms: float | None = None
    prefill_ms: float | None = None
    seconds: float | None = None
    late_s: float | None = None
    phase: str | None = None
    returns_at: float | None = None
    tier: str | None = None
    layer: int | None = None
    point: str | None = None


class Timeline(Answer):
    """Entries, the newest first. If there are more, ask again `before` the last one's id."""

    data: tuple[TimelineEntry, ...]
    has_more: bool


class ActivityMinute(Answer):
    """Turns that ended in the minute that begins `at`, of how many agents, and their tokens. `worst_ms` is the
    longest that one waited for its first token; `late` counts those that began later than their session had signalled.
    """

    at: int
    agents: int
    turns: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_recomputed: int
    worst_ms: float
    late: int


class ServerMark(Answer):
    """The server started or stopped."""

    at: float
    kind: str


class Activity(Answer):
    """Minutes with turns, the oldest first, and starts and stops of the server."""

    minutes: tuple[ActivityMinute, ...]
    marks: tuple[ServerMark, ...]
    has_more: bool
