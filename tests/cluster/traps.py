"""Places in the protocol where a server of the tests kills itself, as `kill -9` would."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from app.cluster.moves import departures
from app.cluster.moves.arrivals import Arrival, Arrivals
from app.cluster.moves.departures import Departures
from app.gpu.kv.mover import KVMover
from app.sessions.registry import SessionRegistry

PLACES: dict[str, tuple[Any, str, bool]] = {
    "a has offered": (departures, "connect", True),
    "a has sent, and written that it leaves": (Departures, "_commit", False),
    "a hears that it is taken": (Departures, "_follow", False),
    "a has let it go": (SessionRegistry, "depart", True),
    "b has been offered it": (Arrivals, "_note", True),
    "b begins to receive it": (KVMover, "_receive", False),
    "b has received it": (KVMover, "_receive", True),
    "b is to take it": (Arrival, "open", False),
    "b is about to write that it has it": (Arrival, "_keep", False),
    "b has written that it has it": (Arrival, "_keep", True),
}
"""The class or module and the method, and whether it dies after it, not before."""


def set_trap(place: str) -> None:
    """Die there the first time. For a server process, before it starts."""
    kind, name, after = PLACES[place]
    original: Callable[..., Any] = getattr(kind, name)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def trapped(*args: Any, **named: Any) -> Any:
        if not after:
            die()
        done = original(*args, **named)
        return die_after(done) if asyncio.iscoroutine(done) else die()

    async def die_after(work: Coroutine[Any, Any, Any]) -> None:
        await work
        die()

    setattr(kind, name, trapped)


def lose_engine(is_back: bool) -> None:
    """Have the engine die as soon as a session that has come is written down. The server goes on when it knows of that,
    or when another engine is there. For a server process, before it starts.
    """
    original: Callable[..., Any] = Arrival._keep

    async def keep(self: Arrival) -> None:
        await original(self)
        executor = self._registry.executor
        os.kill(executor.engine._child._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        while not executor.losses or (executor.failure is None) is not is_back:  # noqa: ASYNC110 (no event says so)
            await asyncio.sleep(0.01)

    Arrival._keep = keep  # type: ignore[method-assign]
