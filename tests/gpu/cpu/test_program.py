"""Programs of kernels: all of each kernel is done before the next one begins, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from app.gpu.cpu import elementwise, openmp
from app.gpu.cpu.program import Program
from app.gpu.programs.recording import Arena, Recording

ROWS, WIDTH, TIMES = 100, 512, 40


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def doublings(tensor: torch.Tensor) -> Program:
    """Adds a tensor to itself again and again, each time in parts that threads draw."""
    recording = Recording()
    with recording.within(Arena()):
        for _ in range(TIMES):
            elementwise.add_(tensor, tensor)
    return Program(recording.launches)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_kernel_finds_what_the_one_before_it_has_left(count: int) -> None:
    tensor = torch.ones(ROWS, WIDTH)
    program = doublings(tensor)
    with threads(count):
        for _ in range(20):
            tensor.fill_(1)
            program.run(0, TIMES)
            assert torch.equal(tensor, torch.full_like(tensor, 2.0**TIMES))


def test_a_part_of_a_program_runs_by_itself() -> None:
    tensor = torch.ones(ROWS, WIDTH)
    program = doublings(tensor)
    assert torch.equal(tensor, torch.ones_like(tensor))  # recording has run nothing
    program.run(3, 5)
    assert torch.equal(tensor, torch.full_like(tensor, 4.0))


def test_without_openmp_the_calling_thread_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_parallel", None)
    tensor = torch.ones(ROWS, WIDTH)
    doublings(tensor).run(0, 2)
    assert torch.equal(tensor, torch.full_like(tensor, 4.0))
