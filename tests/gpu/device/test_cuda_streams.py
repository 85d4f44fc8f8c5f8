"""Streams, events and memory of a CUDA device: what the deferring CPU cannot show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp
from app.gpu.attention import attention_for
from app.gpu.device.choice import streams_of
from app.gpu.device.memory import CudaMemory
from app.gpu.device.staging import PAGE_BYTES, Staging
from app.gpu.device.streams import DeviceStreams
from app.gpu.graphs.recorder import waiting_forbidden
from app.gpu.models import load_stack
from app.gpu.step.activations import HostTensor
from app.messages import Arm
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import data_of
from tests.gpu.conversations import CROWD, GREEDY, HIDDEN, REWRITTEN, SAMPLED, SCORED, Scene, same
from tests.gpu.driving import Driver
from tests.gpu.wrapping import WrappedStack

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
MIB = 1 << 20
BUSY_CYCLES = 200_000_000
"""About a tenth of a second."""
STEP_CYCLES = 2_000_000
"""About a millisecond: longer than the host takes to look for messages."""


class SlowStack(WrappedStack):
    """A GPU is done with so small a model before a message can come."""

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        torch.cuda._sleep(STEP_CYCLES)
        return super().embed(token_ids, positions)


@pytest.fixture(scope="module")
def streams() -> DeviceStreams:
    return streams_of(CUDA)


@pytest.fixture(scope="module")
def on_gpu(torch_gpt2: TinyModel) -> TinyModel:
    stack = load_stack(torch_gpt2.resolved, device=CUDA, dtype=torch.float32, attention=attention_for(CUDA))
    return TinyModel(torch_gpt2.resolved, stack, torch_gpt2.oracle)


def be_busy() -> None:
    """Give the compute stream something to do."""
    torch.cuda._sleep(BUSY_CYCLES)


@pytest.mark.parametrize(("scene", "seed"), [(CROWD, 0), (CROWD, 1), (CROWD, 2), (REWRITTEN, 0)])
def test_clients_are_told_the_same_as_on_a_cpu(
    torch_gpt2: TinyModel, on_gpu: TinyModel, scene: Scene, seed: int
) -> None:
    told, stage = scene.play(replace(on_gpu, stack=SlowStack(on_gpu.stack)), seed)
    expected, _ = scene.play(torch_gpt2, seed)
    assert stage.handled_in_flight or scene is not CROWD
    for found, wanted in zip(told, expected, strict=True):
        assert same(found, wanted)


def test_nothing_waits_for_the_device_while_a_step_is_launched(on_gpu: TinyModel) -> None:
    driver = Driver(on_gpu.engine())
    turns = [driver.submit(driver.open(), prompt(i, 40), 12, each) for i, each in enumerate((GREEDY, SAMPLED, SCORED))]
    driver.finish(*[driver.submit(driver.open(), prompt(i, 40), 12) for i in range(3)])  # kernels are compiled
    steered = driver.open()
    edits = (Edit(EditOp.ADD, 0.7, data_of(vector(0, HIDDEN)), max_norm=2.0),)
    driver.do(Arm(driver.ticket(), steered, Breakpoint("bp_steer", (0, 2), Action.EDIT, edits=edits)))
    turns.append(driver.submit(steered, prompt(9, 40), 12))
    while not all(driver.ended(turn) for turn in turns):
        with waiting_forbidden():
            driver.take(driver.engine.launch())
        driver.take(driver.engine.collect())
    assert driver.memory().kv_owned_bytes


def test_a_large_slab_is_pinned_where_it_is_and_its_copies_overlap_with_compute(streams: DeviceStreams) -> None:
    slab = streams.host_slab((3, 5 << 20))  # no power of two
    assert slab.is_pinned()
    assert not slab.any()
    there = torch.ones(3, 5 << 20, dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()
    be_busy()
    behind = streams.compute.record()
    streams.to_host.copy(slab, there, [(slice(0, 2), slice(1, 3))])
    streams.to_host.record().synchronize()
    assert not behind.query()
    assert slab[:2].all()
    assert not slab[2].any()


def test_a_saved_tensor_is_what_it_was_although_its_memory_is_given_away(streams: DeviceStreams) -> None:
    hidden = torch.arange(1 << 20, dtype=torch.float32, device=CUDA).view(1024, 1024)
    expected = hidden.cpu()
    be_busy()
    doubled = hidden * 2
    saved = HostTensor.save(doubled, streams)
    del doubled
    for _ in range(20):
        torch.full((1024, 1024), torch.nan, device=CUDA)
    back = torch.zeros(24, 1024, device=CUDA)
    saved.load(back, 1000)
    assert torch.equal(saved.tensor, expected * 2)
    assert torch.equal(back.cpu(), expected[1000:] * 2)


def test_staged_arrays_arrive_although_the_next_step_is_written_at_once(streams: DeviceStreams) -> None:
    staging = Staging(streams, CUDA)
    arrived = []
    with torch.inference_mode():
        for step in range(5):
            be_busy()
            staging.begin()
            arrays: list[np.ndarray[Any, Any]] = [
                np.full(100, step, np.int32),
                np.arange(PAGE_BYTES // 4) + step,
                np.array([[step / 3]]),
            ]
            arrived.append((arrays, [staging.put(array) for array in arrays]))
            staging.send()
    for arrays, tensors in arrived:
        for array, tensor in zip(arrays, tensors, strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy(), array)


def test_free_memory_falls_by_what_is_held() -> None:
    memory = CudaMemory(torch.device("cuda"))
    torch.zeros(1, device="cuda")  # what PyTorch loads for the first one stays
    before, pool = memory.free(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):  # not in a gap between tensors that others have left
        held = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    assert before - memory.free() == pytest.approx(held.nbytes, rel=0.1)
    del held, pool
    assert memory.free() == pytest.approx(before, abs=32 * MIB)
    assert memory.free() < memory.total()


def test_the_peak_is_what_was_held_beyond_what_is_held() -> None:
    memory = CudaMemory(torch.device("cuda"))
    kept = [torch.zeros(128 * MIB, dtype=torch.uint8, device="cuda")]
    memory.reset_peak()
    kept.append(torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda"))  # first: memory for it alone
    torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    assert 224 * MIB <= memory.peak() <= 360 * MIB
    memory.reset_peak()
    assert memory.peak() == 0
