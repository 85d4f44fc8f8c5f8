"""How fast a server is, from two looks at it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from client._sync.client import Djinn
from client.errors import DjinnError
from client.history_models import Findings
from client.memory_models import Direction, MemoryMap
from client.models import SessionInfo, SessionState

PATIENCE_S = 5.0
"""How long the engine may take to tell of its memory."""
WITH_A_TURN: tuple[SessionState, ...] = ("running", "queued", "paused")


@dataclass(frozen=True, slots=True)
class Look:
    """A server's memory, its sessions with a turn by id, and what is wrong, at a moment of this machine's clocks in
    seconds. `memory`: None while its engine does not tell; `silence` says why.
    """

    memory: MemoryMap | None
    busy: Mapping[str, SessionInfo]
    monotonic_s: float
    unix_s: float
    findings: Findings
    silence: str = ""


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened each second: tokens of each session that was seen twice, bytes of KV that moved, and bytes of
    weights that were streamed to the device.
    """

    tokens: Mapping[str, float]
    moved_bytes: Mapping[Direction, float]
    streamed_bytes: float

    @property
    def all_tokens(self) -> float:
        """Those of all sessions."""
        return sum(self.tokens.values())


def look(djinn: Djinn) -> Look:
    """Ask the server. What is wrong it tells also without its engine, so that comes first."""
    findings, memory, silence = djinn.findings(), None, ""
    found = [session.info for state in WITH_A_TURN for session in djinn.sessions.list(state=state)]
    busy = {info.id: info for info in found}
    try:
        memory = djinn.memory(timeout=PATIENCE_S)
    except DjinnError as error:
        silence = error.message
    return Look(memory, busy, time.monotonic(), time.time(), findings, silence)


def rates_between(before: Look, after: Look) -> Rates:
    """From one look to the next. A history that was cut, and counts of a server that has started anew, are no rate."""
    seconds = max(after.monotonic_s - before.monotonic_s, 1e-6)
    tokens = {
        session: max(0, info.tokens - before.busy[session].tokens) / seconds
        for session, info in after.busy.items()
        if session in before.busy
    }
    if before.memory is None or after.memory is None:
        return Rates(tokens, {}, 0.0)
    moved = {
        way: max(0, moves.bytes - before.memory.moves[way].bytes) / seconds
        for way, moves in after.memory.moves.items()
        if way in before.memory.moves
    }
    streamed = max(0, after.memory.text.streamed_bytes - before.memory.text.streamed_bytes) / seconds
    return Rates(tokens, moved, streamed)
