"""Reading a file on the threads that PyTorch computes with."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.gpu.cpu.reading import read_on_torch_threads

CONTENT = torch.randint(256, (3000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("threads", [1, 2])
def test_any_part_of_a_file_is_read_as_far_as_it_is_there(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(max_examples=200)
    @given(st.integers(0, 3100), st.integers(0, 3100), st.integers(1, 500))
    def read(offset: int, nbytes: int, part_bytes: int) -> None:
        monkeypatch.setattr("app.gpu.cpu.reading.PART_BYTES", part_bytes)
        target = torch.zeros(nbytes + 1, dtype=torch.uint8)
        there = CONTENT[offset : offset + nbytes]
        assert read_on_torch_threads(file.fileno(), offset, target[:nbytes]) is (len(there) == nbytes)
        if len(there) == nbytes:
            assert torch.equal(target[:nbytes], there)
        assert target[nbytes] == 0

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryFile() as file:
            file.write(CONTENT.numpy().tobytes())
            file.flush()
            read()
    finally:
        torch.set_num_threads(before)


def test_a_file_that_cannot_be_read_is_said_to_be_short() -> None:
    assert not read_on_torch_threads(-1, 0, torch.zeros(10, dtype=torch.uint8))
