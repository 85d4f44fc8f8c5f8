"""Recording work of a CUDA device as CUDA graphs, and whether to do so."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from app.domain.errors import FieldOutOfRange
from app.gpu.forward.graph_decode import Recorder


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Raise RuntimeError from work that makes the host wait, as far as PyTorch notices. Holds for all threads."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls the mode a prototype, once
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


_THREAD_LOCAL = "thread_local"
_CAPTURING = threading.Lock()
"""A process may have one capture under way at a time, whichever thread's it is."""


class CudaRecorder:
    """A `Recorder` that captures `torch.cuda.CUDAGraph`s, all of them in one memory pool. A replay runs on the current
    stream, whichever that is then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None], *, beside: bool = False) -> Callable[[], None]:
        """See `Recorder.record`. Warms up on a side stream and captures on the same, as PyTorch asks for: kernels are
        compiled, libraries have their handles and workspaces for this stream, and none of that is in the graph.
        """
        caller, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(caller)
        # A capture that fails to end leaves its stream the current one; this block sets that right.
        with torch.cuda.stream(self._stream), _CAPTURING:
            try:
                work()
                if not beside:
                    # A capture would not survive work that waits, and up to 2.11 PyTorch's allocator does not survive
                    # such a capture: it believes for ever that one is under way.
                    with waiting_forbidden():
                        work()
            finally:
                caller.wait_stream(self._stream)  # work that has failed half-way writes to tensors, too
            if beside:
                self._capture(graph, work)
            else:
                # Another thread's copies are none of this capture's business.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=_THREAD_LOCAL):
                    work()
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
        """Without what `torch.cuda.graph` does first: it waits for all streams, among them those that move KV, and
        gives back the memory that PyTorch keeps for the next step.
        """
        graph.capture_begin(self._pool, capture_error_mode=_THREAD_LOCAL)
        try:
            work()
        finally:
            graph.capture_end()

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()


def choose_recorder(wanted: bool | None, device: torch.device, *, streamed: bool) -> Recorder | None:
    """None is yes where it can be. Raises FieldOutOfRange for graphs on a device that has none, or of weights that are
    streamed: a graph's operations read the same addresses each time.
    """
    reason = None
    if device.type != "cuda":
        reason = f"the device is {device}, which has no CUDA graphs"
    elif streamed:
        reason = "weights_device does not hold all weights, and those that are streamed have no place of their own"
    if wanted and reason is not None:
        raise FieldOutOfRange(f"cuda_graphs: {reason}", param="cuda_graphs")
    return None if wanted is False or reason is not None else CudaRecorder(device)
