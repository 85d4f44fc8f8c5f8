"""Where the time goes: a trace of everything that is computed inside a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

ROWS = 10


@contextmanager
def traced(trace: Path, device: str) -> Iterator[None]:
    """Writes `trace` (`.json.gz`), which chrome://tracing and Perfetto read, and beside it the ten operators that took
    the longest, as `.txt`. Operators are seen on the thread that enters the block, kernels wherever they come from.
    """
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        yield
    found.export_chrome_trace(str(trace))
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    table = found.key_averages().table(sort_by=order, row_limit=ROWS)
    trace.with_name(trace.name.removesuffix(".json.gz") + ".txt").write_text(table)
