"""A reader that does not read holds up nobody, and goes on with a snapshot."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from app.events.channel import KEPT, KEPT_BYTES, Channel
from app.events.feed import Scope
from app.routers.dependencies import Services

ALL = Scope(None)


def names(piece: bytes) -> list[str]:
    return [line[7:].decode() for line in piece.splitlines() if line.startswith(b"event: ")]


def data(piece: bytes) -> Any:
    return json.loads(next(line[6:] for line in piece.splitlines() if line.startswith(b"data: ")))


async def test_a_reader_that_is_too_slow_gets_a_fresh_snapshot(services: Services) -> None:
    with services.events.reading(ALL) as channel:
        events = services.events.events(ALL, channel, None, lambda: True)
        first = data(await anext(events))
        assert (first["sessions"], first["has_more"]) == ([], False)
        for _ in range(KEPT):
            services.sessions.drop(services.sessions.create())
        session = services.sessions.create()
        snapshot = await anext(events)
        assert names(snapshot) == ["snapshot"]
        assert [each["id"] for each in data(snapshot)["sessions"]] == [session.id]
        services.sessions.drop(session)
        while "session" not in names(piece := await anext(events)):
            pass
        assert b'"closed"' in piece
        await events.aclose()


async def test_without_readers_nothing_is_kept(services: Services) -> None:
    services.sessions.drop(services.sessions.create())
    with services.events.reading(ALL) as channel:
        assert channel.position == 0
        await asyncio.sleep(0.2)
    assert channel.readers == 0
    position = channel.position
    await asyncio.sleep(1.5)
    assert channel.position == position


def test_a_channel_is_bounded_in_bytes() -> None:
    channel = Channel()
    big = b"x" * (KEPT_BYTES // 4)
    for _ in range(10):
        channel.publish("session", big)
    assert channel.after(0) is None
    found = channel.after(channel.position - 3)
    assert found is not None
    assert found[0] == channel.position
    assert len(names(found[1])) == 3


def test_old_figures_are_not_told() -> None:
    channel = Channel()
    for number in range(3):
        channel.publish_newest("memory", b"%d" % number)
    channel.publish("session", b"{}")
    found = channel.after(0)
    assert found is not None
    assert names(found[1]) == ["memory", "session"]
    assert data(found[1]) == 2
    assert channel.find(channel.id_of(4)) == 4
    assert channel.find(channel.id_of(5)) is None
