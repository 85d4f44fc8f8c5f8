"""Sharing PyTorch's threads."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from app.gpu.cpu import openmp


def record_calls(argument: int) -> list[tuple[int, int | None]]:
    """Run a callback on PyTorch's threads; returns the thread and the argument of each call."""
    calls: list[tuple[int, int | None]] = []

    def record(address: int | None) -> None:
        calls.append((threading.get_native_id(), address))

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(record)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    openmp.run_on_torch_threads(address, argument)
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
