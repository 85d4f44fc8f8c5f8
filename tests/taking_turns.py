"""What the tests of the registry share: turns without HTTP in front, and what the engine has of a session."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from app.domain.values import SamplingParams, StopRule
from app.engine_process.turn import Turn
from app.exports.exports import SpoolFile
from app.machine.budget import DiskRoom, Share
from app.messages import TurnFinished
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.sessions.turns import TurnRequest
from app.text.generation import TextRule

GREEDY = SamplingParams(seed=0, temperature=0.0)
LONG = StopRule(max_tokens=900)
PROMPT = [5, 6, 7]


def start_turn(
    registry: SessionRegistry,
    session: Session,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    stop: StopRule,
    *,
    replace: bool = False,
    pausable: bool = True,
) -> Turn:
    """A turn whose events the test reads; nobody has released it."""
    request = TurnRequest(token_ids, sampling, stop, TextRule(), replace, pausable)
    return registry.turns.start(session, request, AsyncExitStack()).turn


async def finish(turn: Turn) -> TurnFinished:
    *_, last = [item async for item in turn]
    assert isinstance(last, TurnFinished)
    return last


async def assert_nothing_is_held(registry: SessionRegistry) -> None:
    memory = await registry.memory()
    assert memory.device.owned_bytes == 0
    assert memory.running == memory.waiting == 0


async def engine_tokens(registry: SessionRegistry, session: Session) -> int:
    """Length of the history that the engine has, once it has done all that it has been told."""
    await registry.memory()
    return session.kv.tokens


def spooled(path: Path) -> SpoolFile:
    """The file `path` for an export, as if a spool had room for it."""
    room = DiskRoom(path.parent)
    return SpoolFile(path, Share(room), 1 << 30, Share(room))
