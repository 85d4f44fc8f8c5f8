# Generated from client/_async by `python client/_generate.py`: make changes there.
"""The live stream as it is read."""

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from httpx_sse import EventSource

from client import calls
from client.calls import Seconds
from client.edge import mapped_errors
from client.errors import ConnectionLost, StreamBroken
from client.live import Event, read_event
from client.transport import Transport


@contextmanager
def live_events(
    transport: Transport, after: str | None, timeout: Seconds, session: str | None = None
) -> Iterator[Iterator[Event]]:
    """What follows the event `after`, or of one session until it is closed. Leaving the block closes the stream."""
    with transport.stream(calls.events(after), timeout) as source:
        events = _read(transport, source, after, timeout)
        chosen = events if session is None else _about(session, events)
        try:
            yield chosen
        finally:
            chosen.close()
            events.close()


def _about(session: str, events: Iterator[Event]) -> Generator[Event, None]:
    for each in events:
        event = each.about(session)
        if event is not None:
            yield event
            if event.change == "closed":
                return


def _read(transport: Transport, source: EventSource, last_id: str | None, timeout: Seconds) -> Generator[Event, None]:
    """Reads `source`. If a stream is lost that has told something, the next one goes on after the last event."""
    stream: AbstractContextManager[EventSource] = nullcontext(source)
    while True:
        has_told = False
        try:
            with nullcontext(_sent(stream)) as sent:
                for event_id, event in sent:
                    last_id = event_id or last_id
                    if event is not None:
                        has_told = True
                        yield event
            raise StreamBroken("the server has ended the stream of events")
        except ConnectionLost:
            if not (has_told and transport.max_retries):
                raise
        stream = transport.stream(calls.events(last_id), timeout)


def _sent(stream: AbstractContextManager[EventSource]) -> Generator[tuple[str, Event | None], None]:
    """The events of one stream, with their ids."""
    with stream as source, mapped_errors(lost=StreamBroken), nullcontext(source.iter_sse()) as sent:
        for each in sent:
            yield each.id, read_event(each)
