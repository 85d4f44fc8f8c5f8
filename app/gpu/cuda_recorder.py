"""Recording work of a CUDA device as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from app.gpu.host_waits import waiting_forbidden


class CudaRecorder:
    """A `Recorder` that captures `torch.cuda.CUDAGraph`s, all of them in one memory pool. A replay runs on the current
    stream, whichever that is then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder.record`. Warms up on a side stream and captures on the same, as PyTorch asks for: kernels are
        compiled, libraries have their handles and workspaces for this stream, and none of that is in the graph.
        """
        caller, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(caller)
        # A capture that fails to end leaves its stream the current one; this block sets that right.
        with torch.cuda.stream(self._stream):
            work()
            # A capture would not survive work that waits, and up to 2.11 PyTorch's allocator does not survive such a
            # capture: it believes for ever that one is under way.
            with waiting_forbidden():
                work()
            # Another thread's copies are none of this capture's business.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        caller.wait_stream(self._stream)
        return graph.replay

    def forget(self) -> None:
        """See `Recorder.forget`."""
        self._pool = torch.cuda.graph_pool_handle()
