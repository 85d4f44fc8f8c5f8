"""Work beside turns: each tenant has its share of it, and no more."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from app.sessions.guards.side_work import Lane, SideWork

AT_ONCE = max(1, (os.cpu_count() or 1) // 2)


def calm(owner: str | None) -> bool:
    return False  # only its own turns are under way


def busy(owner: str | None) -> bool:
    return True


async def test_a_tenant_has_few_pieces_at_once_and_others_do_not_wait_for_them() -> None:
    work, leave, other_begun = SideWork(calm), threading.Event(), threading.Event()
    begun: list[str] = []

    def piece(owner: str) -> None:
        begun.append(owner)
        if owner == "one":
            other_begun.set()
        assert leave.wait(30)

    many = [asyncio.create_task(work.run("many", piece, "many")) for _ in range(AT_ONCE + 5)]
    one = asyncio.create_task(work.run("one", piece, "one"))
    assert await asyncio.to_thread(other_begun.wait, 30)
    assert begun.count("many") <= AT_ONCE
    leave.set()
    await asyncio.gather(one, *many)
    assert begun.count("many") == len(many)


async def test_who_leaves_keeps_the_place_until_the_work_is_done() -> None:
    work, leave = SideWork(calm), threading.Event()
    left = [asyncio.create_task(work.run("a", leave.wait, 30)) for _ in range(AT_ONCE)]
    await asyncio.sleep(0.05)
    for task in left:
        task.cancel()
    after = asyncio.create_task(work.run("a", str))
    assert not (await asyncio.wait([after], timeout=0.1))[0]
    leave.set()
    assert await after == ""
    assert all(isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*left, return_exceptions=True))


async def use(work: SideWork, owner: str, seconds: float) -> None:
    async with work.turn(owner, Lane.FILE) as piece:
        piece.seconds = seconds


async def test_beside_the_turns_of_others_a_tenant_waits_after_each_piece() -> None:
    work = SideWork(busy)
    await use(work, "a", 1000.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(use(work, "a", 0.0), 0.1)
    await asyncio.wait_for(use(work, "b", 0.0), 30)


async def test_a_short_piece_beside_a_long_one_does_not_end_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    work = SideWork(busy)
    async with work.turn("a", Lane.FILE):
        await use(work, "a", 1000.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(use(work, "a", 0.0), 0.1)


async def test_a_text_does_not_wait_for_a_file_and_an_error_gives_the_place_back() -> None:
    work = SideWork(busy)
    async with work.turn("a", Lane.FILE) as piece:
        piece.seconds = 1000.0
        assert await asyncio.wait_for(work.run("a", str), 30) == ""
    alone = SideWork(calm)
    for _ in range(AT_ONCE + 1):
        with pytest.raises(ValueError, match="no number"):
            await asyncio.wait_for(alone.run("a", int, "no number"), 30)
