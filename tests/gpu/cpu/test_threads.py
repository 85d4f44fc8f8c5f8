"""Kernels, programs of them, reads of files and masks of logits on the threads that PyTorch computes with."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.gpu.cpu import elementwise, openmp
from app.gpu.cpu.masks import forbid
from app.gpu.cpu.program import Program
from app.gpu.cpu.reading import PART_BYTES, read_on_torch_threads
from app.gpu.programs.recording import Arena, Recording
from app.gpu.sampling.masks import forbid_on_device

pytestmark = pytest.mark.usefixtures("one_thread")  # which puts back how many there were
ROWS, WIDTH, TIMES = 100, 512, 40
CONTENT = torch.randint(256, (2 * PART_BYTES + 3000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class _Arguments(ctypes.Structure):
    _fields_: ClassVar = [("number", ctypes.c_int64)]


def record_calls(argument: int) -> list[tuple[int, int]]:
    """Run a callback on PyTorch's threads; returns the thread and the argument of each call."""
    calls: list[tuple[int, int]] = []
    arguments = _Arguments(argument)

    def record(address: int | None) -> None:
        assert address is not None
        calls.append((threading.get_native_id(), _Arguments.from_address(address).number))

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(record)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    openmp.run_on_torch_threads(address, arguments)
    return calls


def doublings(tensor: torch.Tensor) -> Program:
    """Adds a tensor to itself again and again, each time in parts that threads draw."""
    recording = Recording()
    with recording.within(Arena()):
        for _ in range(TIMES):
            elementwise.add_(tensor, tensor)
    return Program(recording.launches)


def test_every_thread_of_pytorch_is_called_once_with_the_argument() -> None:
    torch.set_num_threads(3)
    calls = record_calls(1234)
    assert [argument for _, argument in calls] == [1234] * 3
    assert len({thread for thread, _ in calls}) == 3


def test_without_openmp_the_calling_thread_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_parallel", None)
    assert record_calls(5) == [(threading.get_native_id(), 5)]
    tensor = torch.ones(ROWS, WIDTH)
    doublings(tensor).run(0, 2)
    assert torch.equal(tensor, torch.full_like(tensor, 4.0))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_kernel_of_a_program_finds_what_the_one_before_it_has_left(count: int) -> None:
    tensor = torch.ones(ROWS, WIDTH)
    program = doublings(tensor)
    assert torch.equal(tensor, torch.ones_like(tensor)), "recording has run nothing"
    program.run(3, 5)
    assert torch.equal(tensor, torch.full_like(tensor, 4.0)), "a part of it runs by itself"
    torch.set_num_threads(count)
    for _ in range(20):
        tensor.fill_(1)
        program.run(0, TIMES)
        assert torch.equal(tensor, torch.full_like(tensor, 2.0**TIMES))


@given(
    threads=st.integers(1, 3),
    offset=st.integers(0, 3100),
    nbytes=st.one_of(st.integers(0, 3100), st.integers(PART_BYTES - 2, 2 * PART_BYTES + 3100)),
)
def test_any_part_of_a_file_is_read_as_far_as_it_is_there(threads: int, offset: int, nbytes: int) -> None:
    torch.set_num_threads(threads)
    target, there = torch.zeros(nbytes + 1, dtype=torch.uint8), CONTENT[offset : offset + nbytes]
    with tempfile.TemporaryFile() as file:
        file.write(CONTENT.numpy().tobytes())
        file.flush()
        whole = read_on_torch_threads(file.fileno(), offset, target[:nbytes])
    assert whole is (len(there) == nbytes)
    if whole:
        assert torch.equal(target[:nbytes], there)
    assert target[nbytes] == 0, "nothing is written behind it"
    assert not read_on_torch_threads(-1, 0, torch.zeros(10, dtype=torch.uint8)), "a file that cannot be read is short"


ROWS = 16


@pytest.mark.usefixtures("one_thread")  # which puts back how many there were
@pytest.mark.parametrize(
    ("vocab_size", "share"),
    [(1, 0.0), (1, 1.0), (31, 0.5), (32, 0.5), (33, 0.5), (300, 0.01), (4096, 0.5), (4096, 0.0)],
)
def test_only_forbidden_tokens_of_masked_rows_change(vocab_size: int, share: float) -> None:
    torch.set_num_threads(4)
    random = np.random.default_rng(vocab_size)
    logits = torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    rows = torch.tensor([5, 0, 15, 3, 7, 9, 1, 12, 2])
    allowed = random.random((len(rows), vocab_size)) < share
    words = np.full((len(rows), -(-vocab_size // 32) * 32), False)
    words[:, :vocab_size] = allowed
    bits = torch.from_numpy(np.packbits(words, axis=1, bitorder="little").view(np.int32))
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~torch.from_numpy(allowed), -torch.inf)
    for apply in (forbid, forbid_on_device):
        masked = logits.clone()
        apply(masked, rows, bits)
        assert torch.equal(masked, expected)
