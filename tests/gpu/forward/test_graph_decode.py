"""Decode steps that are replayed, with a recorder that needs no device. Where none can be recorded the log says why."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from app.domain.breakpoints import Action, When
from app.domain.errors import FieldOutOfRange
from app.gpu.forward.inputs import FixedBatch
from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch, make_batch
from app.gpu.startup.loader import choose_recorder
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.forward.recording import CPU, FakeRecorder, PaddedAttention, tiny, with_attention
from tests.gpu.kernels.attention.drawing import needs_triton
from tests.gpu.kernels.attention.reference import ReferenceAttention
from tests.gpu.oracle import greedy_tokens

__all__ = ["tiny"]

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [3, 30, 9, 17, 5, 12, 40]


TILE = 256
"""Blocks that the kernel copies at once."""
MOST_ROWS, BLOCKS = 11, 2 * TILE + 5
DEVICE = torch.device("cuda") if torch.cuda.is_available() else CPU


@needs_triton
@pytest.mark.parametrize(
    ("contexts", "rows"),
    [
        pytest.param([1], 1, id="one row"),
        pytest.param([5, 17, 33], 8, id="with padding"),
        pytest.param([4] * MOST_ROWS, MOST_ROWS, id="all rows"),
        pytest.param([4 * BLOCKS, 2], 4, id="the longest context beside a short one"),
        pytest.param([4 * TILE, 4 * TILE + 1], 2, id="whole tiles, and one block more"),
    ],
)
def test_a_step_and_its_padding_are_where_graphs_look(contexts: list[int], rows: int) -> None:
    """The kernel against PyTorch's copies: on a GPU, else interpreted."""
    from app.gpu.models.triton_elementwise import fill_inputs

    tables = [[number + 3 * place for place in range(BLOCKS)] for number, _ in enumerate(contexts)]
    token_ids = torch.arange(7, 7 + len(contexts))
    host, batch = (make_batch([(each - 1, 1) for each in contexts], tables, 4, device) for device in (CPU, DEVICE))
    inputs = FixedBatch(MOST_ROWS, MOST_ROWS, BLOCKS, CPU, groups=1)
    wanted = inputs.first(MOST_ROWS, MOST_ROWS)
    columns = (inputs.token_ids, wanted.positions, wanted.slot_blocks, wanted.slot_offsets)
    for number, tensor in enumerate((*columns, wanted.contexts, wanted.block_tables), 90):
        tensor.fill_(number)  # of an earlier step
    found = (
        torch.stack(columns).to(DEVICE),
        wanted.contexts.to(DEVICE, copy=True),
        wanted.block_tables.to(DEVICE, copy=True),
    )
    inputs.fill(token_ids, host, rows)
    fill_inputs(token_ids.to(DEVICE), batch, *found, rows)
    for ours, theirs in zip(found, (torch.stack(columns), wanted.contexts, wanted.block_tables), strict=True):
        assert torch.equal(ours.cpu(), theirs)


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
