"""An engine whose device does its work late and in any order that the events allow, against one whose device is a CPU:
the same tokens, log-probabilities, activations and histories. And whatever wait is left out, it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch

import app.gpu.kv_pools.host
import app.gpu.startup.running
from app.domain.values import SessionId
from app.gpu.attention.batch import Batch
from app.gpu.device.staging import Download, Staging
from app.gpu.device.streams import PASSED
from app.gpu.kv_pools.device import KVPool
from app.gpu.kv_pools.host import HostPool
from app.gpu.models.base import LayerStack
from app.gpu.sampling import triton_draw
from app.gpu.step.activations import HostTensor
from app.gpu.step.launched import WholeStep
from app.messages import Event, Open, Token
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.conversations import ALONE, CROSSING, CROWD, REWRITTEN, Scene, Told, numbers, same, submit
from tests.gpu.device.deferring import DeferredDevice, DeferredStack
from tests.gpu.planning.scripted import Play, Script
from tests.gpu.wrapping import WrappedStack

SEEDS = range(4)
SCENES = {"crowd": CROWD, "alone": ALONE, "crossing": CROSSING, "rewritten": REWRITTEN}
STREAMS = ["compute", "to_host", "to_device", "saves"]


@pytest.fixture(scope="module")
def expected(torch_gpt2: TinyModel) -> dict[str, list[Told]]:
    """What the clients of each scene are told by an engine on a CPU."""
    return {name: scene.play(torch_gpt2, seed=0)[0] for name, scene in SCENES.items()}


def play_deferred(
    model: TinyModel, scene: str, seed: int, device: DeferredDevice, patch: pytest.MonkeyPatch
) -> list[Told]:
    """What the clients are told by an engine on a device that defers its work."""
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
        pool = device.adopt_pool(KVPool(*sizes, **dtype))
        patch.setattr(HostPool, "late_bytes", 2 * pool.data[0].nbytes)
        return pool

    patch.setattr(app.gpu.kv_pools.host, "PIECE_BYTES", 1)
    for name in ("draw", "draw_any"):  # Triton's kernels are no operators of PyTorch
        patch.setattr(triton_draw, name, device.deferred_draw(getattr(triton_draw, name)))
    patch.setattr(app.gpu.startup.running, "KVPool", make_pool)
    return replace(model, stack=cast("LayerStack", DeferredStack(model.stack, device)), streams=device)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("late", [None, *STREAMS])
@pytest.mark.parametrize(("scene", "seed"), [("crowd", 0), ("rewritten", 0), *product(["alone", "crossing"], SEEDS)])
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


def one_turn(told: Told) -> Script:
    session = SessionId("one")
    yield lambda ticket: Open(ticket, session)
    told.append(numbers((yield submit(session, prompt(1, 5), 6))))


def watch_deliveries(patch: pytest.MonkeyPatch) -> list[bool]:
    """Will say of each delivery with a token whether the device was given a step before."""
    beside, deliver = list[bool](), Play._deliver

    def note(stage: Play, events: Sequence[Event]) -> None:
        assert events
        if any(isinstance(event, Token) for event in events):
            beside.append(stage._engine._step is not None)
        deliver(stage, events)

    patch.setattr(Play, "_deliver", note)
    return beside


@pytest.mark.usefixtures("one_thread")
def test_tokens_are_told_while_the_device_runs_the_next_step(
    torch_gpt2: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the last, after which there is no step. On a CPU each at once."""
    monkeypatch.setitem(SCENES, "one turn", Scene(60, 16, [one_turn]))
    beside = watch_deliveries(monkeypatch)
    play_deferred(torch_gpt2, "one turn", 0, DeferredDevice(0, late="compute"), monkeypatch)
    assert beside == [True] * 5 + [False]
    beside.clear()
    monkeypatch.undo()
    beside = watch_deliveries(monkeypatch)
    Scene(60, 16, [one_turn]).play(torch_gpt2, 0)
    assert beside == [False] * 6


class Noting(WrappedStack):
    """Notes the layers that run, when they do."""

    def __init__(self, stack: LayerStack) -> None:
        super().__init__(stack)
        self.ran: set[int] = set()

    def layer(self, index: int, hidden: torch.Tensor, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        self.ran.add(index)
        return super().layer(index, hidden, batch, kv)


@pytest.mark.usefixtures("one_thread")
def test_a_checkpoint_does_not_wait_for_the_layers_above_it(
    torch_gpt2: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, noting = DeferredDevice(0, late="compute"), Noting(torch_gpt2.stack)
    deferred = defer(replace(torch_gpt2, stack=noting), device, monkeypatch)
    with device:
        driver = BreakDriver(deferred.engine())
        paused = driver.open()
        driver.arm(paused, 0)
        driver.begin(paused, prompt(1, 9), 2)
        driver.begin(driver.open(), prompt(2, 9), 2)
        driver.take(driver.engine.launch())
        step = driver.engine._step
        assert isinstance(step, WholeStep)
        assert [row.way.hi for row in step.rows] == [1, 3]
        [checkpoint] = step.stopped.values()
        assert checkpoint.is_finite()
        assert noting.ran == {0}
        driver.take(driver.engine.collect())


Mutation = Callable[[DeferredDevice, pytest.MonkeyPatch], None]


def no_wait(stream: str) -> Mutation:
    """What is launched on the stream waits for nothing that others do."""
    return lambda device, patch: patch.setattr(getattr(device, stream), "wait", lambda event: None)


def no_end(stream: str) -> Mutation:
    """What is launched on the stream counts as done at once."""
    return lambda device, patch: patch.setattr(getattr(device, stream), "record", lambda: PASSED)


def _staging_not_guarded(device: DeferredDevice, patch: pytest.MonkeyPatch) -> None:
    begin = Staging.begin

    def begin_at_once(staging: Staging) -> None:
        staging._sent = PASSED
        begin(staging)

    patch.setattr(Staging, "begin", begin_at_once)


def _last_bytes_not_followed(device: DeferredDevice, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostPool, "follow", lambda pool, landed: None)


def _tokens_read_early(device: DeferredDevice, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Download, "finish", lambda download: PASSED)


def _loads_do_not_wait(device: DeferredDevice, patch: pytest.MonkeyPatch) -> None:
    def load(stored: HostTensor, hidden: torch.Tensor, first: int = 0) -> None:
        device.compute.copy(hidden, stored._tensor[first : first + len(hidden)])

    patch.setattr(HostTensor, "load", load)


MUTATIONS: dict[str, tuple[str, str, Mutation]] = {
    "copies out do not wait for what computes the blocks": ("alone", "compute", no_wait("to_host")),
    "copies in do not wait for what writes to the blocks": ("crossing", "compute", no_wait("to_device")),
    "blocks are read before the copy in has ended": ("crossing", "to_device", no_end("to_device")),
    "blocks are read before the last bytes have come": ("crossing", "to_device", _last_bytes_not_followed),
    "blocks are given away before the copy out has ended": ("crossing", "to_host", no_end("to_host")),
    "checkpoints do not wait for what computes them": ("alone", "compute", no_wait("saves")),
    "checkpoints are read before they have arrived": ("crowd", "saves", no_end("saves")),
    "checkpoints are put back before they have arrived": ("alone", "saves", _loads_do_not_wait),
    "a step's inputs are overwritten before they are sent": ("alone", "compute", _staging_not_guarded),
    "tokens are read before they have arrived": ("crossing", "compute", _tokens_read_early),
}
"""Each with a scene, and the stream that is late, in which it shows."""


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wait_that_is_left_out_is_found(
    torch_gpt2: TinyModel, expected: dict[str, list[Told]], mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, late, mutate = MUTATIONS[mutation]

    def fails(seed: int) -> bool:
        with monkeypatch.context() as patch:
            device = DeferredDevice(seed, late)
            mutate(device, patch)
            try:
                return not same(play_deferred(torch_gpt2, scene, seed, device, patch), expected[scene])
            except Exception:  # what is read too early need not even make sense
                return True

    assert any(fails(seed) for seed in SEEDS)
