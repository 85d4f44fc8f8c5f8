"""What a recorder asks of CUDA while others use the device, with a CUDA that only notes it."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from app.gpu.graphs.recorder import CudaRecorder

DEVICE = torch.device("cuda")


class NotedCuda:
    """Stands in for `torch.cuda`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        caller = self._stream("caller")
        for name, stand_in in {
            "Stream": lambda device: self._stream("side"),
            "CUDAGraph": self._graph,
            "current_stream": lambda device: caller,
            "graph_pool_handle": lambda: (0, 1),
            "stream": lambda stream: nullcontext(),
            "synchronize": lambda: self.log.append("everything waits"),
            "empty_cache": lambda: self.log.append("memory is given back"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def _stream(self, name: str) -> Any:
        cuda = self

        class Stream:
            def wait_stream(self, other: object) -> None:
                cuda.log.append(f"{name} waits")

        return Stream()

    def _graph(self) -> Any:
        cuda = self

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                cuda.log.append(f"begin {capture_error_mode}")

            def capture_end(self) -> None:
                cuda.log.append("end")

            def replay(self) -> None:
                cuda.log.append("replay")

        return Graph()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> NotedCuda:
    return NotedCuda(monkeypatch)


def test_a_part_is_rehearsed_and_captured_while_nobody_waits_for_the_device(cuda: NotedCuda) -> None:
    replay = CudaRecorder(DEVICE).record(lambda: cuda.log.append("work"), beside=True)
    assert cuda.log == ["side waits", "work", "caller waits", "begin thread_local", "work", "end"]
    replay()
    assert cuda.log[-1] == "replay"


def test_what_follows_a_failed_rehearsal_waits_for_what_it_has_left(cuda: NotedCuda) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        CudaRecorder(DEVICE).record(fail, beside=True)
    assert cuda.log == ["side waits", "caller waits"]


def test_a_capture_that_fails_has_an_end(cuda: NotedCuda) -> None:
    calls = iter([False, True])

    def fail_later() -> None:
        if next(calls):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        CudaRecorder(DEVICE).record(fail_later, beside=True)
    assert cuda.log[-2:] == ["begin thread_local", "end"]


def test_no_capture_begins_within_that_of_another_thread(cuda: NotedCuda) -> None:
    first, second, begun = CudaRecorder(DEVICE), CudaRecorder(DEVICE), threading.Event()

    def record_too() -> None:
        begun.set()
        second.record(lambda: None, beside=True)

    other = threading.Thread(target=record_too)

    def start_other() -> None:
        if cuda.log[-1].startswith("begin"):
            other.start()
            assert begun.wait(10)

    first.record(start_other, beside=True)
    other.join(10)
    captures = [each for each in cuda.log if each == "end" or each.startswith("begin")]
    assert captures == ["begin thread_local", "end"] * 2
