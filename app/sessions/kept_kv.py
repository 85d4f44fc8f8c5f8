"""KV that outlives the server: at its end the engine writes it to disk, the most useful first."""

import asyncio
import logging
import time
from functools import partial

from app.domain.errors import DjinnError
from app.domain.values import Phase, Residency
from app.messages import KeepKV, KeptKV
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session

logger = logging.getLogger(__name__)


LATE_S = 10.0
"""For writes that are under way when the time is over: a disk may have stalled."""


async def keep_kv(registry: SessionRegistry, within_s: float) -> None:
    """Have the KV of the sessions that the journal brings back written to disk, those of turns when they are over.

    Ends `LATE_S` after `within_s` seconds at the latest.
    """
    if not registry.keeper.is_durable:
        return
    now = time.time()
    sessions = sorted((each for each in registry.table if not each.ephemeral), key=lambda each: worth(each, now))
    try:
        async with asyncio.timeout(within_s + LATE_S):
            kept: KeptKV = await registry.executor.call(
                partial(KeepKV, sessions=tuple(session.id for session in sessions), within_s=within_s)
            )
    except TimeoutError:
        logger.error("drain: a write of KV has not ended within %g s; the server ends without it", within_s + LATE_S)
        return
    except DjinnError as error:
        logger.warning("drain: KV was not written to disk: %s", error.message)
        return
    logger.info(
        "drain: sessions with KV on disk: %d, with %d tokens; sessions that lose KV: %d, with %d tokens",
        kept.sessions,
        kept.tokens,
        kept.lost,
        kept.lost_tokens,
    )


def worth(session: Session, now: float) -> tuple[bool, bool, float]:
    """Orders sessions, those first whose KV is wanted first."""
    return session.residency is not Residency.GUARANTEED, session.phase is Phase.IDLE, returns_in_s(session, now)


def returns_in_s(session: Session, now: float) -> float:
    """In how many seconds the session may go on. Who has not said when it returns, may stay away for as long again as
    it has been away.
    """
    return now - session.used_at if session.returns_at is None else max(0.0, session.returns_at - now)
