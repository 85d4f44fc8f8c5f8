"""Who gives way at a cap, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import socket

import pytest
from prometheus_client import CollectorRegistry

from app.metrics.connections import ConnectionMetrics, Refused
from app.web.connections.caps import LOOPBACK, Caps
from app.web.connections.table import GRACE_S, Connection, ConnectionTable

HERE, THERE = "192.0.2.1", "192.0.2.2"


class Connections:
    """A table of real connections to nobody."""

    def __init__(self, caps: Caps) -> None:
        self.table = ConnectionTable(caps, ConnectionMetrics(CollectorRegistry()))
        self._ends: list[socket.socket] = []

    async def open(self, origin: str, *, waits_since: float | None = None) -> Connection:
        ours, theirs = socket.socketpair()
        self._ends.append(theirs)
        connection = self.table.open(origin)
        loop = asyncio.get_running_loop()
        connection.transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, ours)
        self.table.set_waiting(connection, waits_since)
        return connection

    async def close(self) -> None:
        for connection in self.table:
            assert connection.transport is not None
            connection.transport.abort()
        await asyncio.sleep(0)
        for end in self._ends:
            end.close()


def is_open(connection: Connection) -> bool:
    return connection.transport is not None and not connection.transport.is_closing()


async def test_a_connection_whose_request_may_be_on_its_way_does_not_give_way() -> None:
    connections = Connections(Caps(1, 1, 1))
    new = await connections.open(LOOPBACK, waits_since=100.0)
    assert connections.table.make_room(LOOPBACK, 100.0) is Refused.TOTAL
    assert is_open(new)
    assert connections.table.make_room(LOOPBACK, 100.0 + 2 * GRACE_S) is None
    assert not is_open(new)
    await connections.close()


async def test_an_address_at_its_cap_takes_no_room_from_another() -> None:
    connections = Connections(Caps(total=9, per_origin=2, loopback=9))
    other = await connections.open(THERE, waits_since=1.0)
    own = [await connections.open(HERE, waits_since=since) for since in (3.0, 2.0)]
    assert connections.table.make_room(HERE, 10.0) is None
    assert [is_open(each) for each in own] == [False, True]  # in the order in which they began to wait
    await connections.open(HERE)
    connections.table.set_waiting(own[1], None)
    assert connections.table.make_room(HERE, 10.0) is Refused.ADDRESS
    assert connections.table.make_room(LOOPBACK, 10.0) is None
    assert is_open(other)
    await connections.close()


@pytest.mark.parametrize("request_comes", [False, True])
async def test_room_that_was_given_up_is_counted_once(request_comes: bool) -> None:
    connections = Connections(Caps(2, 2, 2))
    gone = await connections.open(LOOPBACK, waits_since=1.0)
    await connections.open(LOOPBACK)
    assert connections.table.make_room(LOOPBACK, 10.0) is None
    if request_comes:
        connections.table.set_waiting(gone, 10.0)
    connections.table.close(gone)
    await connections.open(LOOPBACK)
    assert connections.table.make_room(LOOPBACK, 20.0) is Refused.TOTAL
    await connections.close()
