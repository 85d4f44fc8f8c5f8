"""An engine whose device does its work late tells clients what one on a CPU tells. What it copies arrives whole."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

import app.gpu.kv.pools
import app.gpu.startup.kv
from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp
from app.domain.errors import FieldOutOfRange
from app.domain.values import SessionId
from app.gpu.device.hardware import LARGE_BYTES, DeviceMemory, LargeMemory, allocating
from app.gpu.device.streams import (
    PAGE_BYTES,
    PASSED,
    WHOLE,
    CpuStream,
    CpuStreams,
    CudaStreams,
    DeviceStreams,
    Run,
    Staging,
    streams_of,
)
from app.gpu.engine import Engine
from app.gpu.forward.boundary import HostTensor
from app.gpu.forward.graphs import waiting_forbidden
from app.gpu.kernels.attention import attention_for
from app.gpu.kv.pools import HostPool, KVPool
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.sampling import sampler, triton_draw
from app.messages import Arm, Event, Open, Token
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import data_of
from tests.gpu.conversations import ALONE, CROSSING, CROWD, REWRITTEN, SAMPLED, SCORED, Scene, Told, same, submit
from tests.gpu.device.deferring import DeferredDevice, DeferredStack
from tests.gpu.driving import Driver
from tests.gpu.planning.scripted import Play, Script
from tests.gpu.wrapping import WrappedStack

pytestmark = pytest.mark.usefixtures("one_thread")
SEEDS = range(2)
SCENES = {"crowd": CROWD, "alone": ALONE, "crossing": CROSSING, "rewritten": REWRITTEN}
STREAMS = ["compute", "to_host", "to_device", "saves"]


@pytest.fixture(scope="module")
def expected(torch_gpt2: TinyModel) -> dict[str, list[Told]]:
    """What the clients of each scene are told by an engine on a CPU."""
    return {name: scene.play(torch_gpt2, seed=0)[0] for name, scene in SCENES.items()}


def play_deferred(
    model: TinyModel, scene: str, seed: int, device: DeferredDevice, patch: pytest.MonkeyPatch
) -> list[Told]:
    deferred = defer(model, device, patch)
    with device:
        told, stage = SCENES[scene].play(deferred, seed)
    assert stage.handled_in_flight or scene != "crowd"
    return told


def defer(model: TinyModel, device: DeferredDevice, patch: pytest.MonkeyPatch) -> TinyModel:
    """The model on a device that defers its work, as well as the engines that are made of it. Moves to the device are
    told of when two blocks have yet to come, or one.
    """

    def make_pool(*sizes: Any, **dtype: Any) -> KVPool:
        pool = KVPool(*sizes, **dtype)
        device.adopt(pool.data)
        patch.setattr(HostPool, "late_bytes", 2 * pool.data[0].nbytes)
        return pool

    def draw(probabilities: Tensor, uniforms: Tensor, *limits: Tensor) -> Tensor:
        return sampler._draw(probabilities, uniforms, cast("sampler.Limits | None", limits or None), on_host=True)

    patch.setattr(app.gpu.kv.pools, "PIECE_BYTES", 1)
    # Triton's kernels are no operators of PyTorch, and draw the same tokens in a hundred times the time.
    patch.setattr(triton_draw, "draw", device.deferred_draw(draw))
    patch.setattr(app.gpu.startup.kv, "KVPool", make_pool)
    return replace(model, stack=cast("LayerStack", DeferredStack(model.stack, device)), streams=device)


QUICK = [("crowd", None), ("rewritten", None), ("alone", "compute"), ("alone", "saves")]
QUICK += [("crossing", late) for late in ("compute", "to_host", "to_device")]
PLAYS = [
    *product(["crowd", "rewritten"], [None, *STREAMS], [0]),
    *product(["alone", "crossing"], [None, *STREAMS], SEEDS),
]


@pytest.mark.parametrize(
    ("scene", "late", "seed"),
    [pytest.param(*play, marks=[] if play[:2] in QUICK and play[2] < 2 else pytest.mark.long) for play in PLAYS],
)
def test_clients_are_told_the_same_whatever_the_order(
    torch_gpt2: TinyModel,
    expected: dict[str, list[Told]],
    scene: str,
    seed: int,
    late: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = play_deferred(torch_gpt2, scene, seed, DeferredDevice(seed, late), monkeypatch)
    for found, wanted in zip(told, expected[scene], strict=True):
        assert same(found, wanted)


def one_turn() -> Script:
    session = SessionId("one")
    yield lambda ticket: Open(ticket, session)
    yield submit(session, prompt(1, 5), 6)


class Begun(WrappedStack):
    """Counts the steps that have begun."""

    steps = 0

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().embed(token_ids, positions)


class Listening(Play):
    """Notes of each token whether the device was given a step before it was told."""

    def __init__(self, engine: Engine, stack: Begun) -> None:
        super().__init__(engine, [one_turn()], seed=0)
        self.beside = list[bool]()
        self._stack, self._before = stack, stack.steps

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                self.beside.append(self._stack.steps - self._before > len(self.beside) + 1)
        super()._deliver(events)


def test_tokens_are_told_while_the_device_runs_the_next_step(
    torch_gpt2: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the last, after which there is no step. On a CPU each at once."""
    device = DeferredDevice(0, late="compute")
    deferred = defer(torch_gpt2, device, monkeypatch)
    there: AbstractContextManager[object] = device
    for model, where, wanted in ((deferred, there, [True] * 5 + [False]), (torch_gpt2, nullcontext(), [False] * 6)):
        stack = Begun(model.stack)
        with where:
            stage = Listening(replace(model, stack=stack).engine(blocks=60, max_step_tokens=16), stack)
            stage.run()
        assert stage.beside == wanted
        monkeypatch.undo()


# Arrays of a step, blocks of KV, and memory that is pinned.

CPU = torch.device("cpu")


class CountingStream(CpuStream):
    """Notes how many bytes each copy has."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def copy(self, target: Tensor, source: Tensor, runs: Iterable[Run] = WHOLE) -> None:
        for write, read in runs:
            self.sizes.append(source[read].nbytes)
            super().copy(target, source, [(write, read)])


def counting_streams() -> tuple[CpuStreams, CountingStream]:
    """Streams, all of whose copies are noted in one."""
    streams, counting = CpuStreams(), CountingStream()
    streams.compute = streams.to_host = streams.to_device = counting
    return streams, counting


def arrays(seed: int, tokens: int) -> list[np.ndarray[Any, Any]]:
    chooser = np.random.default_rng(seed)
    return [
        chooser.integers(0, 1 << 40, tokens),
        chooser.integers(0, 1 << 20, (3, 5), dtype=np.int32),
        np.zeros(0, np.int64),
        chooser.random((tokens, 1), np.float32),
        chooser.random((2, 1)),
    ]


def assert_arrives(staging: Staging, sent: list[np.ndarray[Any, Any]]) -> None:
    staging.begin()
    placed = [staging.put(array) for array in sent]
    staging.send()
    for tensor, array in zip(placed, sent, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % 16 == 0


def test_what_is_put_arrives_in_one_copy_but_for_a_step_that_is_larger_than_any_before() -> None:
    streams, counting = counting_streams()
    staging = Staging(streams, CPU)
    for seed, tokens, copies in ((0, 7, 1), (1, 1000, 1), (2, PAGE_BYTES // 6, 3), (3, PAGE_BYTES // 6, 1)):
        counting.sizes.clear()
        assert_arrives(staging, [*arrays(seed, tokens), *arrays(seed, 10)])
        assert len(counting.sizes) == copies


def test_a_step_that_was_given_up_leaves_nothing_behind() -> None:
    staging = Staging(CpuStreams(), CPU)
    staging.begin()
    for seed in range(3):
        staging.put(np.full(PAGE_BYTES // 8, seed))
    assert_arrives(staging, arrays(0, 10))


def test_blocks_go_out_and_come_back_in_pieces_that_leave_gaps_for_others(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, (streams, counting) = KVPool(tiny_llama.stack, 24, 4), counting_streams()
    pool.data.normal_(generator=torch.Generator().manual_seed(0))
    block_bytes = pool.data[0].nbytes
    monkeypatch.setattr(app.gpu.kv.pools, "PIECE_BYTES", 3 * block_bytes + 1)
    host, before = HostPool(pool, 40, streams), pool.data.clone()
    host.copy_out(range(24), range(5, 29), PASSED)
    pool.data.zero_()
    host.copy_in(range(5, 29), range(24), PASSED)
    assert torch.equal(pool.data, before)
    assert counting.sizes == [3 * block_bytes] * 16


SIZE = 64 << 20


@pytest.mark.parametrize(("code", "free", "says"), [(2, SIZE, "CUDA error 2"), (0, SIZE - 1, "more than is free")])
def test_memory_that_cannot_be_pinned_or_is_not_there_names_the_setting(
    code: int, free: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: CudaStreams = CudaStreams.__new__(CudaStreams)  # its streams would need a device
    runtime, memory = SimpleNamespace(cudaHostRegister=lambda *_: code), psutil.virtual_memory()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=free))
    with pytest.raises(FieldOutOfRange, match=says) as refused, allocating("kv_host", SIZE):
        streams.host_slab((SIZE >> 20, 1 << 20))
    assert refused.value.param == "kv_host"


# On a GPU.

CUDA, MIB = torch.device("cuda"), 1 << 20
BUSY_CYCLES = 200_000_000
"""About a tenth of a second."""
STEP_CYCLES = 2_000_000
"""About a millisecond: longer than the host takes to look for messages."""


class SlowStack(WrappedStack):
    """A GPU is done with so small a model before a message can come."""

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        torch.cuda._sleep(STEP_CYCLES)
        return super().embed(token_ids, positions)


def on_a_gpu(test: Any) -> Any:
    """The test shows what the deferring CPU cannot."""
    return pytest.mark.cuda(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@pytest.fixture(scope="module")
def streams() -> DeviceStreams:
    return streams_of(CUDA)


@pytest.fixture(scope="module")
def on_gpu(torch_gpt2: TinyModel) -> TinyModel:
    stack = load_stack(torch_gpt2.resolved, device=CUDA, dtype=torch.float32, attention=attention_for(CUDA))
    return TinyModel(torch_gpt2.resolved, stack, torch_gpt2.oracle)


def be_busy() -> None:
    torch.cuda._sleep(BUSY_CYCLES)


@on_a_gpu
@pytest.mark.parametrize(("scene", "seed"), [(CROWD, 0), (CROWD, 1), (CROWD, 2), (REWRITTEN, 0)])
def test_clients_are_told_the_same_as_on_a_cpu(
    torch_gpt2: TinyModel, on_gpu: TinyModel, scene: Scene, seed: int
) -> None:
    told, stage = scene.play(replace(on_gpu, stack=SlowStack(on_gpu.stack)), seed)
    expected, _ = scene.play(torch_gpt2, seed)
    assert stage.handled_in_flight or scene is not CROWD
    for found, wanted in zip(told, expected, strict=True):
        assert same(found, wanted)


@on_a_gpu
def test_nothing_waits_for_the_device_while_a_step_is_launched(on_gpu: TinyModel) -> None:
    driver = Driver(on_gpu.engine())
    turns = [driver.submit(driver.open(), prompt(i, 40), 12, each) for i, each in enumerate((SAMPLED, SCORED))]
    driver.finish(*[driver.submit(driver.open(), prompt(i, 40), 12) for i in range(3)])  # kernels are compiled
    steered = driver.open()
    edits = (Edit(EditOp.ADD, 0.7, data_of(vector(0, on_gpu.stack.hidden_size)), max_norm=2.0),)
    driver.do(Arm(driver.ticket(), steered, Breakpoint("bp_steer", (0, 2), Action.EDIT, edits=edits)))
    turns.append(driver.submit(steered, prompt(9, 40), 12))
    while not all(driver.ended(turn) for turn in turns):
        with waiting_forbidden():
            driver.take(driver.engine.launch())
        driver.take(driver.engine.collect())
    assert driver.memory().device.owned_bytes


@on_a_gpu
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


@on_a_gpu
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


@on_a_gpu
def test_free_memory_falls_by_what_is_held() -> None:
    memory = DeviceMemory(torch.device("cuda"))
    torch.zeros(1, device="cuda")  # what PyTorch loads for the first one stays
    before, pool = memory.free(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):  # not in a gap between tensors that others have left
        held = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    assert before - memory.free() == pytest.approx(held.nbytes, rel=0.1)
    del held, pool
    assert memory.free() == pytest.approx(before, abs=32 * MIB)
    assert memory.free() < memory.total()


@on_a_gpu
def test_the_peak_is_what_was_held_beyond_what_is_held() -> None:
    memory = DeviceMemory(torch.device("cuda"))
    kept = [torch.zeros(128 * MIB, dtype=torch.uint8, device="cuda")]

    def work() -> None:
        kept.append(torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda"))  # first: memory for it alone
        torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
        torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")

    assert 224 * MIB <= memory.peak_of(work) <= 360 * MIB
    assert memory.peak_of(lambda: None) == 0


def test_large_memory_goes_to_others_when_nothing_refers_to_it_and_no_more_of_it_is_kept() -> None:
    memory, shape = LargeMemory(2 * LARGE_BYTES), (LARGE_BYTES - 100,)
    held = [memory.take(shape, torch.uint8, "a")[0].fill_(number) for number in range(3)]
    part, address = held[1][7:9], held[1].data_ptr()
    del held[1]
    held.append(memory.take(shape, torch.uint8, "a")[0])
    assert held[-1].data_ptr() != address
    assert part.tolist() == [1, 1]
    del part
    for filled, is_blank in (("a", True), ("b", False), ("b", True)):
        again, found = memory.take(shape, torch.uint8, filled)
        assert (again.data_ptr(), found) == (address, is_blank)
        del again
    held.clear()
    assert sum(len(each) for each, _ in memory._free) == 2 * LARGE_BYTES
