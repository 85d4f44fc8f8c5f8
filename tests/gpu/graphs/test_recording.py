"""What cannot be recorded runs without graphs and says why; what graphs will take is known before."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.attention.base import Attention, AttentionSpec
from app.gpu.attention.batch import Batch
from app.gpu.attention.reference import ReferenceAttention
from app.gpu.graphs.decode import DecodeLimits, batch_buckets
from app.gpu.graphs.recorder import choose_recorder
from app.gpu.graphs.recording import estimate_graph_bytes
from app.gpu.graphs.runs import KEPT_PASSES
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt
from tests.gpu.graphs.graph_models import CPU, tiny, with_attention
from tests.gpu.graphs.recording import FakeMemory, FakeRecorder, PaddedAttention
from tests.gpu.oracle import greedy_tokens

__all__ = ["tiny"]

pytestmark = pytest.mark.usefixtures("one_thread")


class Remembers(PaddedAttention):
    """Takes what it has once read of a batch on the host, when that was first recorded, for what always holds."""

    def __init__(self) -> None:
        super().__init__()
        self._real: dict[int, Any] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        output = super().__call__(query, key, value, kv, batch, spec)
        if not batch.rows:
            real = self._real.setdefault(batch.decodes, batch.contexts.numpy() > 0)
            output.numpy()[~real] = 0
        return output


class Waits(PaddedAttention):
    """Looks at a number on the device while it computes."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        assert int(batch.contexts.max()) >= 0
        return super().__call__(query, key, value, kv, batch, spec)


@pytest.mark.parametrize(
    ("attention", "reason"),
    [(ReferenceAttention(), "zip"), (Waits(), "cannot be recorded"), (Remembers(), "are off by")],
    ids=["needs-rows", "waits", "remembers"],
)
def test_a_model_that_cannot_be_recorded_runs_without_and_says_why(
    tiny: TinyModel, attention: Attention, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FakeRecorder()
    with caplog.at_level(logging.WARNING):
        driver = BreakDriver(with_attention(tiny, attention).engine(recorder=recorder, max_draft_tokens=0))
    [message] = [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]
    assert message.startswith("decode steps run without CUDA graphs: ")
    assert reason in message
    assert recorder.recorded == 0
    turn = driver.begin(driver.open(), prompt(4, 9), 8)
    driver.settle(turn)
    assert turn.tokens == greedy_tokens(tiny.oracle, prompt(4, 9), 8)


def test_the_estimate_is_the_largest_graph_and_a_small_one_for_each_of_the_others_and_for_parts(
    tiny: TinyModel,
) -> None:
    recorder = FakeRecorder()
    memory = FakeMemory(recorder, [7000, 300])
    limits = DecodeLimits(rows=20, blocks=32, vocab_size=tiny.stack.vocab_size)
    assert batch_buckets(20) == [1, 2, 4, 8, 16, 20]
    found = estimate_graph_bytes(tiny.stack, BLOCK, limits, recorder, memory, tiny.stack.dtype)
    assert found == 7000 + (5 + KEPT_PASSES) * 300
    assert recorder.recorded == 0


def test_what_cannot_be_recorded_takes_no_memory(tiny: TinyModel) -> None:
    recorder, stack = FakeRecorder(), with_attention(tiny, Waits()).stack
    limits = DecodeLimits(rows=20, blocks=32, vocab_size=stack.vocab_size)
    assert estimate_graph_bytes(stack, BLOCK, limits, recorder, FakeMemory(recorder, []), stack.dtype) == 0


def test_graphs_that_are_asked_for_need_a_gpu() -> None:
    with pytest.raises(FieldOutOfRange, match="cuda_graphs: the device is cpu") as error:
        choose_recorder(True, CPU, streamed=False)
    assert error.value.param == "cuda_graphs"
    assert choose_recorder(None, CPU, streamed=False) is None
    assert choose_recorder(False, CPU, streamed=False) is None
