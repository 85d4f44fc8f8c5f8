"""The asyncio client's own half of breakpoints: every method once, and what it gives is what the blocking one gives."""

from __future__ import annotations

import numpy as np
import pytest

import client
from client import AsyncDjinn, Djinn
from tests.client.breakpoints.pausing import GREEDY


async def test_pausing_looking_changing_and_going_on(djinn: Djinn, server_url: str) -> None:
    with djinn.sessions.create() as session:
        expected = session.generate(**GREEDY).token_ids
    async with AsyncDjinn(server_url, timeout=30) as adjinn, await adjinn.sessions.create() as paused:
        armed = await paused.break_at(layer=1)
        assert (await paused.generate(**GREEDY)).status == "paused"
        checkpoint = await paused.checkpoint()
        assert (checkpoint.layer, checkpoint.first, checkpoint.end, checkpoint.info.breakpoint) == (1, 0, 20, armed.id)
        activation = await checkpoint.read()
        assert activation.shape == checkpoint.shape
        with djinn.sessions.get(paused.id) as twin:
            np.testing.assert_array_equal(activation, twin.checkpoint().activation)
            assert await checkpoint.lens() == twin.checkpoint().lens()
            await checkpoint.edit(scale=0.5)
            np.testing.assert_array_equal(await checkpoint.read("last"), 0.5 * activation[-1:])
            await checkpoint.write(activation)
            turn = await paused.step(layer=3)
            assert turn.checkpoint is not None
            assert turn.checkpoint.layer == 3
            assert (await paused.step()).token_ids == expected[:1]
            async with paused.resume_stream(until="end") as stream:
                rest = [token async for event in stream for token in event.token_ids]
        assert tuple(rest) == expected[1:]
        assert stream.turn.token_ids == expected


async def test_breakpoints_captures_and_vectors(server_url: str) -> None:
    async with AsyncDjinn(server_url, timeout=30) as djinn, await djinn.sessions.create() as session:
        await djinn.vectors.put("async", np.ones(64))
        assert [vector.name for vector in await djinn.vectors.list()] == ["async"]
        steering = await session.steer(layer=0, add="async")
        await djinn.vectors.delete("async")
        with pytest.raises(client.NotFound):
            await djinn.vectors.get("async")
        capture = await session.capture_at(layer=2, when_pass="decode")
        assert [armed.id for armed in await session.breakpoints()] == [steering.id, capture.id]
        await session.generate(**GREEDY)
        assert {record.breakpoint for record in (await session.captures()).records} == {capture.id}
        await session.clear_captures()
        assert (await session.captures()).records == ()
        await steering.remove()
        await session.clear_breakpoints()
        assert await session.breakpoints() == []
        with pytest.raises(client.Conflict):
            await session.resume()
        with pytest.raises(client.Conflict):
            async with session.resume_stream():
                pytest.fail("a turn goes on that is not there")
