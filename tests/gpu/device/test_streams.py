"""An engine whose device does its work late and in any order that the events allow, against one whose device is a CPU:
the same tokens, log-probabilities, activations and histories. And whatever wait is left out, it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch

import app.gpu.kv_pools.host
import app.gpu.startup.running
from app.domain.values import SessionId
from app.gpu.engine import Engine
from app.gpu.kv_pools.device import KVPool
from app.gpu.kv_pools.host import HostPool
from app.gpu.models.base import LayerStack
from app.gpu.sampling import triton_draw
from app.messages import Event, Open, Token
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.conversations import ALONE, CROSSING, CROWD, REWRITTEN, Told, same, submit
from tests.gpu.device.deferring import DeferredDevice, DeferredStack
from tests.gpu.planning.scripted import Play, Script
from tests.gpu.wrapping import WrappedStack

pytestmark = pytest.mark.usefixtures("one_thread")
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
