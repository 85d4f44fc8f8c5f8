from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.domain.breakpoints import TensorData
from app.domain.errors import FieldOutOfRange, NotDurable
from app.journal.journal import Journal
from app.sessions.whitebox.vectors import MAX_VECTORS, Vectors
from tests.file_sizes import largest_file
from tests.journal.building import model_info


def vector(value: float) -> TensorData:
    return TensorData("float32", (2,), struct.pack("<2f", value, 0.0))


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """A journal that writes, in `tmp_path`."""
    journal = Journal(tmp_path)
    journal.load(model_info())
    journal.start()
    yield journal
    journal.close()


async def test_an_owner_has_at_most_so_many_but_may_replace_them() -> None:
    vectors = Vectors(None)
    for index in range(MAX_VECTORS):
        await vectors.put("me", f"v{index}", vector(index))
    with pytest.raises(FieldOutOfRange, match="1000"):
        await vectors.put("me", "one more", vector(0))
    await vectors.put("me", "v0", vector(7))
    await vectors.put("you", "v0", vector(8))
    assert vectors.get("me", "v0") == vector(7)


async def test_what_was_put_is_there_after_a_restart(journal: Journal, tmp_path: Path) -> None:
    vectors = Vectors(journal)
    await vectors.put("me", "calm", vector(1))
    await vectors.put(None, "angry", vector(2))
    await vectors.delete(None, "angry")
    journal.close()
    again = Journal(tmp_path)
    again.load(model_info())
    found = Vectors(again)
    assert found.owned_by("me") == {"calm": vector(1)}
    assert found.owned_by(None) == {}
    again.close()


async def test_a_vector_that_cannot_be_kept_is_told(journal: Journal) -> None:
    wide = TensorData("float32", (100_000,), bytes(400_000))
    with largest_file(200_000), pytest.raises(NotDurable, match="full"):
        await Vectors(journal).put("me", "calm", wide)
