"""The live stream as it is read."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext

from httpx_sse import EventSource

from client import calls
from client.calls import Seconds
from client.edge import mapped_errors
from client.errors import ConnectionLost, StreamBroken
from client.live import Event, read_event
from client.transport import AsyncTransport


@asynccontextmanager
async def live_events(
    transport: AsyncTransport, after: str | None, timeout: Seconds, session: str | None = None
) -> AsyncIterator[AsyncIterator[Event]]:
    """What follows the event `after`, or of one session until it is closed. Leaving the block closes the stream."""
    async with transport.stream(calls.events(after), timeout) as source:
        events = _read(transport, source, after, timeout)
        chosen = events if session is None else _about(session, events)
        try:
            yield chosen
        finally:
            await chosen.aclose()
            await events.aclose()


async def _about(session: str, events: AsyncIterator[Event]) -> AsyncGenerator[Event, None]:
    async for each in events:
        event = each.about(session)
        if event is not None:
            yield event
            if event.change == "closed":
                return


async def _read(
    transport: AsyncTransport, source: EventSource, last_id: str | None, timeout: Seconds
) -> AsyncGenerator[Event, None]:
    """Reads `source`. If a stream is lost that has told something, the next one goes on after the last event."""
    stream: AbstractAsyncContextManager[EventSource] = nullcontext(source)
    while True:
        has_told = False
        try:
            async with aclosing(_sent(stream)) as sent:
                async for event_id, event in sent:
                    last_id = event_id or last_id
                    if event is not None:
                        has_told = True
                        yield event
            raise StreamBroken("the server has ended the stream of events")
        except ConnectionLost:
            if not (has_told and transport.max_retries):
                raise
        stream = transport.stream(calls.events(last_id), timeout)


async def _sent(stream: AbstractAsyncContextManager[EventSource]) -> AsyncGenerator[tuple[str, Event | None], None]:
    """The events of one stream, with their ids."""
    async with stream as source:
        with mapped_errors(lost=StreamBroken):
            async with aclosing(source.aiter_sse()) as sent:
                async for each in sent:
                    yield each.id, read_event(each)
