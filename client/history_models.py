"""What sessions and the server did, as the server remembers it for 30 days, and what is wrong now."""

from typing import Literal

from client.answer import Answer


class Finding(Answer):
    """One sentence that an operator should know, and whom it is about: `sessions`, the worst first, or a `tenant`."""

    kind: str
    """`unready`, `replica`, `killed`, `restarts`, `failing`, `disk`, `kv_files`, `waiting`, `refused`, `connections`,
    `silent`, `late`, `late_kv`, `device`, `host`, `kv_disk`, `dropped`, `recomputed`.
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
    much later it began than a signal had said; below 0 it was early. `recompute_reason` is why KV of its context was
    gone: `dropped` as no tier had room, `restarted` with the server or engine, `moved` without it; None: not known.
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
    recompute_reason: str | None = None
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
    name: str | None = None
    """Of one that `closed`."""


class Timeline(Answer):
    """Entries, the newest first. If there are more, ask again `before` the last one's id."""

    data: tuple[TimelineEntry, ...]
    has_more: bool


class ActivityMinute(Answer):
    """Turns that ended in the minute, or `step_s`, that begins `at`, of how many agents in the same minute, and their
    tokens. `worst_ms` is the longest that one waited for its first token; `late` counts those that began later than
    their session had signalled, `late_restores` those that waited for KV that was not on the device.

    `bytes_out` of KV left the device, `bytes_in` came back. Sessions held `device_bytes`, `host_bytes` and `disk_bytes`
    at its end; `turns_running` and `turns_waiting` are the most that were seen. Of several minutes, these are the most.
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
    late_restores: int
    bytes_out: int
    bytes_in: int
    bytes_to_disk: int
    bytes_from_disk: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    turns_running: int
    turns_waiting: int


class ServerMark(Answer):
    """What happened to the server, called `replica` in a cluster."""

    at: float
    kind: str
    """`started`, `deployed` (started with another version or model), `draining`, `drained`, `stopped`, `killed` (it was
    last heard of then) or `engine_restarted`.
    """
    version: str | None = None
    model: str | None = None
    replica: str | None = None


class Activity(Answer):
    """Minutes in which there was anything, the oldest first, and what happened to the server."""

    minutes: tuple[ActivityMinute, ...]
    marks: tuple[ServerMark, ...]
    has_more: bool


class ClosedSession(Answer):
    """A session that closed at that time. `name` is what its client called it; only its tenant is told."""

    id: str
    tenant: str | None
    name: str
    closed_at: float


class ClosedSessions(Answer):
    """Closed sessions, the last one first. If there are more, ask again `before` the last one's time."""

    data: tuple[ClosedSession, ...]
    has_more: bool
