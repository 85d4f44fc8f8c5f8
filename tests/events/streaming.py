"""Readers of the live stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from httpx_sse import ServerSentEvent, connect_sse

LIMIT = 400
"""Most events that a test looks at: what it waits for would have come before."""


class Reader:
    """One open stream. `last_id` is what a browser would come back with."""

    def __init__(self, events: Iterator[ServerSentEvent]) -> None:
        self._events = events
        self.last_id = ""

    def next(self) -> tuple[str, Any]:
        """The next event, and what its data says."""
        event = next(self._events)
        self.last_id = event.id or self.last_id
        return event.event, event.json()

    def read_on(self) -> None:
        """Read to the end, which the server makes."""
        for event in self._events:
            self.last_id = event.id or self.last_id

    def until(self, name: str, **fields: object) -> list[tuple[str, Any]]:
        """All up to the next event of that name whose data has these fields."""
        found: list[tuple[str, Any]] = []
        while len(found) < LIMIT:
            found.append(self.next())
            if found[-1][0] == name and fields.items() <= found[-1][1].items():
                return found
        raise AssertionError(f"no {name} with {fields} in {LIMIT} events")


@contextmanager
def reading(http: httpx.Client, last_id: str | None = None, **headers: str) -> Iterator[Reader]:
    sent = headers if last_id is None else {"Last-Event-ID": last_id, **headers}
    with connect_sse(http, "GET", "/v1/events", headers=sent) as source:
        source.response.raise_for_status()
        yield Reader(source.iter_sse())


def ids(snapshot: tuple[str, Any]) -> set[str]:
    assert snapshot[0] == "snapshot"
    return {session["id"] for session in snapshot[1]["sessions"]}
