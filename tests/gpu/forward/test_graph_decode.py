"""Decode steps that are replayed, with a recorder that needs no device. Where none can be recorded the log says why."""

import logging
from typing import Any

import pytest
from torch import Tensor

from app.domain.breakpoints import Action, When
from app.domain.errors import FieldOutOfRange
from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch
from app.gpu.startup.loader import choose_recorder
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.forward.recording import CPU, FakeRecorder, PaddedAttention, tiny, with_attention
from tests.gpu.kernels.attention.reference import ReferenceAttention
from tests.gpu.oracle import greedy_tokens

__all__ = ["tiny"]

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [3, 30, 9, 17, 5, 12, 40]


TILE = 256
"""Blocks that the kernel copies at once."""
BLOCKS = 2 * TILE + 5


def test_sessions_that_come_and_go_get_the_tokens_of_transformers(tiny: TinyModel) -> None:
    """Longer and shorter ones take each other's places, while prompts of others run."""
    driver, turns = BreakDriver(tiny.engine(recorder=FakeRecorder(), max_draft_tokens=0)), []
    for seed, length in enumerate(LENGTHS + LENGTHS[:4]):
        start = prompt(seed, length)
        turns.append((start, driver.begin(driver.open(), start, 5 + seed)))
        driver.advance()
        driver.advance()
    driver.settle(*(turn for _, turn in turns))
    for start, turn in turns:
        assert turn.tokens == greedy_tokens(tiny.oracle, start, len(turn.tokens))
    assert driver.memory().steps.replayed > 20


def test_a_breakpoint_that_no_position_meets_costs_no_graph(tiny: TinyModel) -> None:
    driver, replayed = BreakDriver(tiny.engine(recorder=FakeRecorder(), max_draft_tokens=0)), []
    session = driver.open()
    turn = driver.begin(session, prompt(1, 6), 12)
    driver.arm(session, 2, action=Action.CAPTURE, when=When(position=13))
    while not turn.rests:
        driver.advance()
        replayed.append(driver.memory().steps.replayed)
    assert replayed == [0, *range(1, 8), 7, *range(8, 11)]


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
    turn = driver.turn(driver.open(), prompt(4, 9), 8)
    assert turn.tokens == greedy_tokens(tiny.oracle, prompt(4, 9), 8)


def test_graphs_that_are_asked_for_need_a_gpu() -> None:
    with pytest.raises(FieldOutOfRange, match="cuda_graphs: the device is cpu") as error:
        choose_recorder(True, CPU, streamed=False)
    assert error.value.param == "cuda_graphs"
    assert choose_recorder(None, CPU, streamed=False) is None
    assert choose_recorder(False, CPU, streamed=False) is None
