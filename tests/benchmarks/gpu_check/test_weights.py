"""What a pass is said to stream is what it streams."""

from pathlib import Path

import pytest

from app.gpu.startup.loader import load_engine
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import make_settings
from benchmarks.gpu_check.large_model import with_layers
from benchmarks.gpu_check.plan import TINY
from benchmarks.gpu_check.stages.weights import streamed_bytes

PASSES = 50


def test_bytes_of_a_pass_are_those_that_the_engine_counts(tmp_path: Path) -> None:
    plan = TINY.streaming
    settings = make_settings(
        "cpu",
        plan.model,
        weights_device=plan.budget,
        cache_dir=tmp_path,
        kv_device="1x256",
        kv_policy="none",
        max_draft_tokens=0,
    )
    with LiveEngine(load_engine(with_layers(plan.model, plan.layers), settings.engine())) as live:
        session = live.open()
        live.generate(session, [1], 1)
        before = live.memory().text.streamed_bytes
        live.generate(session, [2], PASSES)
        counted = (live.memory().text.streamed_bytes - before) / PASSES
        assert counted == pytest.approx(streamed_bytes(live, plan), rel=0.01)
