# Generated from client/_async by `python client/_generate.py`: make changes there.
"""The turn of a trace."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from client import breakpoint_calls, calls
from client.calls import Seconds, TurnOptions
from client.captures import Captures
from client.errors import NotFound
from client.trace import Trace
from client.transport import Transport


@contextmanager
def trace_turn(transport: Transport, session: str, options: TurnOptions, timeout: Seconds) -> Iterator[Trace]:
    """Note what the block wants, run one turn with it, and take its breakpoints away again."""
    trace = Trace()
    yield trace
    armed: list[str] = []
    try:
        for body, _ in trace.planned:
            armed.append((transport.send(breakpoint_calls.arm(session, body), timeout)).id)
        turn = transport.send(calls.generate(session, options, stream=False), timeout)
        captures = Captures((), 0)
        if any(saved is not None for _, saved in trace.planned):
            captures = transport.send(breakpoint_calls.read_captures(session, None, None), timeout)
        if trace.finish(turn, armed, captures):
            transport.send(breakpoint_calls.clear_captures(session), timeout)
    finally:
        for breakpoint in armed:
            with suppress(NotFound):
                transport.send(breakpoint_calls.remove_breakpoint(session, breakpoint), timeout)
