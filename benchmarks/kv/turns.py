"""Turns and moves of a session on a real server, with checks that what is timed is what was meant."""

import time
from collections.abc import Sequence

from client import Session, Turn
from client.models import Tier
from loadgen.processes.process import ServerFailedError

POLL_S = 0.002
TIMEOUT_S = 10.0


def first_token_s(session: Session, token_ids: Sequence[int]) -> float:
    """Seconds from a request with new tokens to the first token of the answer, which has no other.

    Raises ServerFailedError if any KV had to be recomputed.
    """
    begin = time.perf_counter()
    with session.stream(token_ids=token_ids, max_tokens=1, temperature=0, ignore_eos=True) as stream:
        next(iter(stream))
        seconds = time.perf_counter() - begin
        for _ in stream:
            pass
    check_nothing_recomputed(stream.turn)
    return seconds


def extend(session: Session, token_ids: Sequence[int]) -> None:
    """Run a turn with new tokens that generates one more, with the checks of `first_token_s`."""
    turn = session.generate(token_ids=token_ids, max_tokens=1, temperature=0, ignore_eos=True)
    check_nothing_recomputed(turn)


def park(session: Session) -> None:
    """Signal `io_wait`, and return when the KV has left the device."""
    session.set_phase("io_wait")
    wait_for_tier(session, "host")


def fetch(session: Session) -> None:
    """Signal `ready`, and return when the KV is back on the device."""
    session.set_phase("ready")
    wait_for_tier(session, "device")


def wait_for_tier(session: Session, tier: Tier, timeout_s: float = TIMEOUT_S) -> None:
    """Return when the session's KV is in `tier`. Raises ServerFailedError if it does not come there in time."""
    deadline = time.monotonic() + timeout_s
    while session.refresh().kv.tier != tier:
        if time.monotonic() > deadline:
            raise ServerFailedError(f"after {timeout_s:g} s KV is in tier {session.info.kv.tier}, not {tier}")
        time.sleep(POLL_S)


def check_nothing_recomputed(turn: Turn) -> None:
    """Raises ServerFailedError if the turn lost KV that an earlier one had computed."""
    if turn.usage.tokens_recomputed:
        raise ServerFailedError(f"the server computed {turn.usage.tokens_recomputed} tokens again")
