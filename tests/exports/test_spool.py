"""Files on their way have a budget, a number and the room of the disk; each is asked before the file."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from app.domain.errors import DiskShort, SpoolFull, TooLarge
from app.exports.exports import CHUNK_BYTES, MAX_FILES, Spool, write_chunks
from app.machine.budget import DiskRoom
from tests.file_sizes import free_on_disks


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path, DiskRoom(tmp_path), 1000)


async def test_files_share_a_budget_until_they_are_gone(spool: Spool, tmp_path: Path) -> None:
    async with spool.file(None) as one, spool.file(None) as two:
        one.claim(600)
        two.claim(400)
        two.claim(300)
        with pytest.raises(SpoolFull, match="need"):
            two.claim(401)
    async with spool.file(None) as file:
        file.claim(1000)
        with pytest.raises(TooLarge, match="max_spool_bytes"):
            file.claim(1001)
    assert not any(tmp_path.glob("*"))  # noqa: ASYNC240 (a test may wait for its own disk)


async def test_so_many_files_are_under_way_at_once(spool: Spool) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(MAX_FILES):
            await stack.enter_async_context(spool.file(None))
        with pytest.raises(SpoolFull, match=str(MAX_FILES)):
            await stack.enter_async_context(spool.file(None))
    async with spool.file(None):
        pass


async def test_a_tenant_leaves_places_to_others(spool: Spool) -> None:
    async with AsyncExitStack() as stack:
        for owner, most in (("greedy", MAX_FILES // 2), ("also greedy", MAX_FILES // 4)):
            for _ in range(most):
                await stack.enter_async_context(spool.file(owner))
            with pytest.raises(SpoolFull, match=f"^{most} exports and imports of this tenant"):
                await stack.enter_async_context(spool.file(owner))
        await stack.enter_async_context(spool.file("late"))


async def test_a_tenant_leaves_bytes_to_others(spool: Spool) -> None:
    async with spool.file("greedy") as one, spool.file("greedy") as two, spool.file("late") as three:
        one.claim(400)
        two.claim(100)
        with pytest.raises(SpoolFull, match="by this tenant, who leaves others as much"):
            two.claim(101)
        three.claim(500)
    async with spool.file("greedy") as only:
        only.claim(1000)


async def test_a_body_of_unknown_length_ends_where_room_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0
    free_on_disks(monkeypatch, lambda: (4 - sent) * CHUNK_BYTES)
    spool = Spool(tmp_path, DiskRoom(tmp_path, CHUNK_BYTES), 100 * CHUNK_BYTES)

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(10):
            sent += 1
            yield bytes(CHUNK_BYTES)

    async with spool.file(None) as file:
        with pytest.raises(DiskShort, match="not stored"):
            await write_chunks(file, body())
        assert file.path.stat().st_size == 2 * CHUNK_BYTES
