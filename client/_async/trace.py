"""The turn of a trace."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from client import breakpoint_calls, calls
from client.calls import Seconds, TurnOptions
from client.captures import Captures
from client.errors import NotFound
from client.trace import Trace
from client.transport import AsyncTransport


@asynccontextmanager
async def trace_turn(
    transport: AsyncTransport, session: str, options: TurnOptions, timeout: Seconds
) -> AsyncIterator[Trace]:
    """Note what the block wants, run one turn with it, and take its breakpoints away again."""
    trace = Trace()
    yield trace
    armed: list[str] = []
    try:
        for body, _ in trace.planned:
            armed.append((await transport.send(breakpoint_calls.arm(session, body), timeout)).id)
        turn = await transport.send(calls.generate(session, options, stream=False), timeout)
        captures = Captures((), 0)
        if any(saved is not None for _, saved in trace.planned):
            captures = await transport.send(breakpoint_calls.read_captures(session, None, None), timeout)
        if trace.finish(turn, armed, captures):
            await transport.send(breakpoint_calls.clear_captures(session), timeout)
    finally:
        for breakpoint in armed:
            with suppress(NotFound):
                await transport.send(breakpoint_calls.remove_breakpoint(session, breakpoint), timeout)
