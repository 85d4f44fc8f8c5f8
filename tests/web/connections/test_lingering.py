"""Connections that stay for a moment after their last answer."""

from __future__ import annotations

import asyncio
import socket

import pytest

from app.web.connections.lingering import DROPPED_BYTES, MOST, Lingering
from tests.web.connections.conftest import wait_until


async def test_of_what_is_sent_after_the_answer_no_more_than_a_bound_is_read() -> None:
    loop = asyncio.get_running_loop()
    lingering = Lingering()
    ended, client = socket.socketpair()
    client.setblocking(False)
    lingering.take(ended)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await loop.sock_sendall(client, bytes(2 * DROPPED_BYTES))
    assert ended.fileno() >= 0
    lingering.close()
    assert ended.fileno() < 0
    client.close()


async def test_a_connection_stays_until_its_client_closes_or_too_many_stay() -> None:
    lingering = Lingering()
    pairs = [socket.socketpair() for _ in range(MOST + 1)]
    for ended, _ in pairs:
        lingering.take(ended)
    assert [ended.fileno() >= 0 for ended, _ in pairs] == [False] + [True] * MOST
    pairs[1][1].close()
    await asyncio.to_thread(wait_until, lambda: pairs[1][0].fileno() < 0)
    assert pairs[2][0].fileno() >= 0
    lingering.close()
    assert all(ended.fileno() < 0 for ended, _ in pairs)
    for _, client in pairs:
        client.close()
