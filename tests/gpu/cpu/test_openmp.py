"""Sharing PyTorch's threads."""

from __future__ import annotations

import ctypes
import threading
from typing import ClassVar

import pytest
import torch

from app.gpu.cpu import openmp


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


def test_every_thread_of_pytorch_is_called_once_with_the_argument() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        calls = record_calls(1234)
    finally:
        torch.set_num_threads(threads)
    assert [argument for _, argument in calls] == [1234] * 3
    assert len({thread for thread, _ in calls}) == 3


def test_without_openmp_the_calling_thread_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_parallel", None)
    assert record_calls(5) == [(threading.get_native_id(), 5)]
