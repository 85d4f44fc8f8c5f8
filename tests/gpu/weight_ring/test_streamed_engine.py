"""Engines of which the device holds a part of the weights, against those that hold all: the same bits."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from app.domain.breakpoints import Action, Edit, EditOp, Pass, When
from app.domain.memory_map import MemoryMap
from app.domain.values import KVPolicy, Phase, SamplingParams, Ticket
from app.gpu.engine import Engine
from app.gpu.weight_files.file import BundleFile
from app.messages import Done, Event, Inspect
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import tensor_of
from tests.gpu.weight_ring.streaming import streaming

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLED = SamplingParams(seed=3, temperature=0.9, top_p=0.9)


def say(model: TinyModel, seed: int) -> list[Any]:
    """What four sessions are told by an engine on whose device two of them have room.

    They compute together; one pauses after every layer and is edited there, one has all layers captured, one is
    steered, and all have their KV moved out between their turns.
    """
    engine = model.engine(blocks=24, host_blocks=200, policy=KVPolicy.SIGNAL)
    driver, chance, said = BreakDriver(engine), random.Random(seed), list[Any]()
    paused, captured, steered, _ = sessions = [driver.open() for _ in range(4)]
    layers = tuple(range(model.num_layers))
    driver.arm(paused, *layers, when=When(every=3))
    driver.arm(captured, *layers, action=Action.CAPTURE, when=When(Pass.DECODE))
    driver.arm(steered, *layers, action=Action.EDIT, edits=(Edit(EditOp.SCALE, factor=0.9),))
    for number in range(2):
        turns = [driver.begin(each, prompt(seed + number, 9 + 3 * i), 5, SAMPLED) for i, each in enumerate(sessions)]
        while not turns[0].rests:
            driver.advance()
        while turns[0].paused:
            said.append(driver.read(turns[0]).tolist())
            driver.edit(turns[0], Edit(EditOp.SCALE, factor=1.01))
            driver.resume(turns[0])
            driver.settle(turns[0])
        driver.run_together(turns, chance)
        said += [turn.tokens for turn in turns]
        said += [tensor_of(record.tensor).tolist() for record in driver.captures(captured).records]
        for each in sessions:
            driver.signal(each, Phase.IO_WAIT)
            assert driver.place(each).device_bytes == 0
    return said


def wait_at_rest(engine: Engine, kept_bytes: int) -> None:
    """Run the engine without work until so many bytes of weights are kept."""
    said: queue.SimpleQueue[Done] = queue.SimpleQueue()

    def deliver(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Done):
                said.put(event)

    thread = threading.Thread(target=engine.run, args=[deliver])
    thread.start()
    try:
        for ticket in range(10_000, 10_100):
            engine.send(Inspect(Ticket(ticket)))
            memory = said.get(timeout=30).value
            assert isinstance(memory, MemoryMap)
            if memory.text.kept_bytes == kept_bytes:
                return
        raise AssertionError("weights that were lent do not come back")
    finally:
        engine.stop()
        thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.mark.parametrize(
    ("name", "share"),
    [("scaled_llama", 1 / 6), ("tiny_mistral", 1 / 6), ("tiny_gpt2", 0.25), ("tiny_llama", 0.6), ("tiny_llama", 0.97)],
)
def test_tokens_and_activations_are_those_of_an_engine_that_holds_all(
    request: pytest.FixtureRequest, folder: Path, name: str, share: float
) -> None:
    model: TinyModel = request.getfixturevalue(name)
    with streaming(model, folder, share) as streamed:
        assert say(streamed, seed=1) == say(model, seed=1)


@pytest.mark.parametrize("in_memory", [0, 0.5])
def test_it_makes_no_difference_what_comes_from_the_disk(
    tiny_gpt2: TinyModel, folder: Path, monkeypatch: pytest.MonkeyPatch, in_memory: float
) -> None:
    """What the system has in memory is used where it is, the rest is copied to the ring."""
    chance = random.Random(0)
    monkeypatch.setattr(BundleFile, "is_cached", lambda *_: chance.random() < in_memory)
    with streaming(tiny_gpt2, folder, 0.25) as streamed:
        assert say(streamed, seed=1) == say(tiny_gpt2, seed=1)


def test_a_pass_may_begin_and_end_anywhere(tiny_gpt2: TinyModel, folder: Path) -> None:
    """Nobody else computes, so every pass ends where the session pauses, and the next begins there."""
    found = []
    with streaming(tiny_gpt2, folder, 0.25) as streamed:
        for model in (tiny_gpt2, streamed):
            driver = BreakDriver(model.engine())
            session = driver.open()
            driver.arm(session, 1, 2, 7, 11)
            turn = driver.begin(session, prompt(5, 12), 6)
            hidden = []
            while not turn.rests or turn.paused:
                if turn.paused:
                    hidden.append(driver.read(turn))
                    driver.resume(turn)
                driver.settle(turn)
            found.append((turn.tokens, hidden))
    assert found[0][0] == found[1][0]
    assert len(found[0][1]) == 4 * 6
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_weights_lend_their_memory_to_sessions_that_compute(tiny_gpt2: TinyModel, folder: Path) -> None:
    """Six turns, with room for the KV of two: those that compute get that of weights, which come back afterwards."""
    found = []
    with streaming(tiny_gpt2, folder, 0.8) as streamed:
        for model in (tiny_gpt2, streamed):
            driver = BreakDriver(model.engine(blocks=16, host_blocks=200, policy=KVPolicy.SIGNAL))
            kept, blocks = [driver.memory().text.kept_bytes], [driver.memory().kv_total_bytes]
            turns = [driver.begin(driver.open(), prompt(seed, 20), 12) for seed in range(6)]
            while not all(turn.rests for turn in turns):
                driver.advance()
                kept.append(driver.memory().text.kept_bytes)
                blocks.append(driver.memory().kv_total_bytes)
            for turn in turns:
                driver.signal(turn.session, Phase.IO_WAIT)
            found.append([turn.tokens for turn in turns])
            driver.engine._mover = driver.mover.threaded
            wait_at_rest(driver.engine, kept[0])
    assert found[0] == found[1]
    assert min(kept) < kept[0]
    assert max(blocks) > blocks[0]
