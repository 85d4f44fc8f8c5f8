"""What the resume stage takes for the moment when the model stands again."""

import time
from io import StringIO
from pathlib import Path

import pytest
from torch import Tensor

from app.gpu.step.activations import HostTensor
from benchmarks.engine import watched as room
from benchmarks.engine.loading import FEW, build, load_layers
from benchmarks.engine.watched import WatchedStack
from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.plan import TINY
from benchmarks.gpu_check.reports.journal import Journal
from benchmarks.gpu_check.stages.resume import _Bench

COPY_S = 0.2


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residual streams that have arrived only some time after their copy was launched, as on a GPU."""
    arrives_at, load = [0.0], HostTensor.load

    def launch(stored: HostTensor, hidden: Tensor, first: int = 0) -> None:
        load(stored, hidden, first)
        arrives_at[0] = time.perf_counter() + COPY_S

    monkeypatch.setattr(HostTensor, "load", launch)
    monkeypatch.setattr(room, "synchronize", lambda _: time.sleep(max(0.0, arrives_at[0] - time.perf_counter())))


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("slow_copies")
def test_djinn_stands_when_the_residual_stream_has_arrived() -> None:
    """After any layer, the last one included, above which only the head is left."""
    plan = TINY.resume
    context = StageContext(TINY, Journal(StringIO(), has_targets=False), 0.0, Path())
    budgets = {"kv_device": f"1x{plan.device_tokens}", "kv_host": f"3x{plan.device_tokens}"}
    watched = WatchedStack(load_layers(context, plan.model), TINY.device)
    with build(context, plan.model, watched, max_running=FEW, **budgets) as live:
        bench = _Bench(live, watched, plan)
        for layer in (1, live.info.num_layers):
            sample = bench.sample(layer)
            assert COPY_S <= sample.djinn <= sample.token_s
