"""A step that goes wrong ends its turns, and nothing else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
import torch

from app.domain.errors import EngineError
from app.domain.values import StopRule, Ticket
from app.gpu.device import health
from app.gpu.device.health import DeviceLost
from app.messages import Event, Failed, Submit, TurnFinished
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import GREEDY, Driver
from tests.gpu.oracle import greedy_tokens as expected
from tests.gpu.tiny_engine import driver, make_engine, model, oracle, prompt

__all__ = ["driver", "model", "oracle"]

T = TypeVar("T")


def test_a_step_that_fails_ends_its_turns_and_leaves_the_engine_running(
    driver: Driver, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = driver.open()
    first = driver.answer(session, prompt(3, 6), 4)
    before = prompt(3, 6) + driver.tokens(first)
    turn = driver.submit(session, prompt(9, 6), 10)
    with monkeypatch.context() as patch:
        patch.setattr(driver.runner.stack, "head", lambda *_: 1 / 0)
        [failed] = driver.engine.step()[-1:]
    assert "division" in str(failed)
    assert turn not in [event for event in driver.events if driver.ended(event)]
    again = driver.answer(session, [4], 5, GREEDY)
    assert driver.tokens(again) == expected(oracle, [*before, 4], 5)


def raise_cuda_error(*_: object) -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_an_error_that_the_device_survives_ends_turns_only(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = driver.submit(driver.open(), prompt(3, 6), 4)
    with monkeypatch.context() as patch:
        patch.setattr(driver.runner.stack, "head", raise_cuda_error)
        [failed] = driver.engine.step()[-1:]
    assert isinstance(failed, Failed)
    assert failed.ticket == turn
    driver.answer(driver.open(), prompt(3, 6), 4)


def test_a_device_that_does_not_recover_ends_the_engine(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.submit(driver.open(), prompt(3, 6), 4)
    monkeypatch.setattr(driver.runner.stack, "head", raise_cuda_error)
    monkeypatch.setattr(health, "probe", raise_cuda_error)
    with pytest.raises(DeviceLost, match="does not recover: CUDA error: an illegal memory access"):
        driver.engine.step()


def test_a_step_that_cannot_be_planned_fails_its_turns_and_leaves_the_engine_running(
    model: ResolvedModel, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(make_engine(model))
    engine, session = driver.engine, driver.open()
    first = driver.answer(session, prompt(3, 6), 4)
    engine._mover = driver.mover.threaded
    before = prompt(3, 6) + driver.tokens(first)
    plan, failures = engine._scheduler.plan, iter([True])
    monkeypatch.setattr(engine._scheduler, "plan", lambda: 1 / 0 if next(failures, False) else plan())
    others = [driver.open() for _ in range(2)]
    said: queue.SimpleQueue[Event] = queue.SimpleQueue()
    failing = [Ticket(1000 + number) for number in range(3)]
    for ticket, name in zip(failing, [session, *others], strict=True):
        engine.send(Submit(ticket, name, tuple(prompt(9, 6)), GREEDY, StopRule(10)))

    def deliver(events: Sequence[Event]) -> None:
        for event in events:
            said.put(event)

    thread = threading.Thread(target=engine.run, args=[deliver])
    thread.start()
    try:
        errors = {each.ticket: each.error for each in take(said, Failed, 3)}
        again = Ticket(2000)
        engine.send(Submit(again, session, (4,), GREEDY, StopRule(5)))
        [end] = take(said, TurnFinished, 1)
    finally:
        engine.stop()
        thread.join(timeout=20)
    assert set(errors) == set(failing)
    assert all(isinstance(error, EngineError) and "division" in error.message for error in errors.values())
    assert end.history_tokens == len(before) + 1 + 5
    [sequence] = [each for each in engine._handler.sequences if each.session == session]
    assert sequence.tokens == [*before, 4, *expected(oracle, [*before, 4], 5)]


@pytest.mark.parametrize("broken", ["admit", "missing", "reserve", "extend_plain", "add_a_draft"])
def test_an_error_of_planning_ends_the_turn_that_it_is_about_and_no_other(
    model: ResolvedModel, oracle: Any, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(make_engine(model, max_draft_tokens=7 if broken == "add_a_draft" else 0))
    engine, session = driver.engine, driver.open()
    scheduler = engine._scheduler
    first = driver.submit(session, prompt(3, 6), 4)
    driver.finish(first)
    before = prompt(3, 6) + driver.tokens(first)
    others = {seed: driver.submit(driver.open(), prompt(seed, 6), 30) for seed in (1, 2)}
    driver.take(engine.step())
    turn = driver.submit(session, prompt(9, 6), 30)
    places = {"admit": (scheduler._admission, "admit"), "add_a_draft": (scheduler.drafting, "_room")}
    planner, name = places.get(broken, (scheduler.cache, broken))
    works = getattr(planner, name)

    def break_down(about: Any, *others: Any) -> Any:
        return 1 / 0 if getattr(about, "sequence", about).session == session else works(about, *others)

    failed: list[Failed] = []
    with monkeypatch.context() as patch:
        patch.setattr(planner, name, break_down)
        for _ in range(20):
            events = engine.step()
            failed = [event for event in events if isinstance(event, Failed)]
            driver.take([event for event in events if event not in failed])
            if failed:
                break
    assert [each.ticket for each in failed] == [turn]
    assert isinstance(failed[0].error, EngineError)
    assert "division" in failed[0].error.message
    scheduler.check_integrity()
    again = driver.submit(session, [4], 5)
    driver.finish(again, *others.values())
    assert driver.tokens(again) == expected(oracle, [*before, 4], 5)
    for seed, other in others.items():
        assert driver.tokens(other) == expected(oracle, prompt(seed, 6), 30)


def take(said: queue.SimpleQueue[Event], kind: type[T], count: int) -> list[T]:
    """The next events of this kind; others are passed over."""
    found: list[T] = []
    while len(found) < count:
        event = said.get(timeout=20)
        if isinstance(event, kind):
            found.append(event)
    return found
