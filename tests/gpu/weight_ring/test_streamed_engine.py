"""Engines of which the device holds a part of the weights, against those that hold all: the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.domain.breakpoints import Action, Edit, EditOp, Pass, When
from app.domain.values import KVPolicy, Phase, SamplingParams, SessionId, StopRule, Ticket
from app.gpu.attention import attention_named
from app.gpu.startup.weights import load_model
from app.gpu.step.launched import LaunchedStep, WholeStep
from app.gpu.weight_files.file import BundleFile
from app.messages import Event, Open, Submit, Token, TurnFinished
from app.settings import Settings
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.breakpoints.breaking_oracle import tensor_of
from tests.gpu.conversations import GREEDY

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SAMPLED = SamplingParams(seed=3, temperature=0.9, top_p=0.9)


@contextmanager
def streaming(model: TinyModel, folder: Path, share: float) -> Iterator[TinyModel]:
    """The same model with room on the device for a `share` of its parameters; its files are kept in `folder`."""
    settings = Settings(weights_device=int(model.stack.parameter_bytes * share), cache_dir=folder)
    loaded = load_model(model.resolved, settings.engine(), CPU, torch.float32, attention_named("cpu"))
    assert loaded.streamed is not None
    try:
        yield replace(model, stack=loaded.stack, streams=loaded.streams, streamed=loaded.streamed)
    finally:
        loaded.close()


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param("scaled_llama", 1 / 6, marks=pytest.mark.long),
        pytest.param("tiny_mistral", 1 / 6, marks=pytest.mark.long),
        ("tiny_llama", 0.6),
        ("tiny_llama", 0.97),
    ],
)
def test_tokens_and_activations_are_those_of_an_engine_that_holds_all(
    request: pytest.FixtureRequest, folder: Path, name: str, share: float
) -> None:
    model: TinyModel = request.getfixturevalue(name)
    with streaming(model, folder, share) as streamed:
        assert say(streamed, seed=1) == say(model, seed=1)


def test_it_makes_no_difference_what_comes_from_the_disk(
    tiny_gpt2: TinyModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system has in memory is used where it is, the rest is copied to the ring."""
    chance, expected = random.Random(0), say(tiny_gpt2, seed=1)
    for in_memory in (1, 0, 0.5):
        monkeypatch.setattr(BundleFile, "is_cached", lambda *_, share=in_memory: chance.random() < share)
        with streaming(tiny_gpt2, folder, 0.25) as streamed:
            assert say(streamed, seed=1) == expected


def test_weights_lend_their_memory_to_sessions_that_compute(tiny_gpt2: TinyModel, folder: Path) -> None:
    """Six turns, with room for the KV of two: those that compute get that of weights."""
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
            found.append([turn.tokens for turn in turns])
    assert found[0] == found[1]
    assert min(kept) < kept[0]
    assert max(blocks) > blocks[0]


def test_a_token_is_told_before_the_next_sweep_begins(
    torch_gpt2: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a GPU the launch of a sweep waits for most of its copies."""
    monkeypatch.setattr(WholeStep, "done", False)  # the step runs beside the engine's thread
    order, session = list[str](), SessionId("one")
    with streaming(torch_gpt2, tmp_path, 0.9) as model:
        engine = model.engine(blocks=20, policy=KVPolicy.NONE, max_draft_tokens=0)
        launch = engine._runner.launch

        def sweep(*step: Any) -> LaunchedStep:
            order.append("sweep")
            return launch(*step)

        monkeypatch.setattr(engine._runner, "launch", sweep)

        def deliver(events: Sequence[Event]) -> None:
            order.extend("token" for event in events if isinstance(event, Token))
            if any(isinstance(event, TurnFinished) for event in events):
                engine.stop()

        engine.send(Open(Ticket(1), session))
        engine.send(Submit(Ticket(2), session, tuple(prompt(1, 5)), GREEDY, StopRule(4)))
        engine.run(deliver)
    assert order == ["sweep", "token"] * 4
