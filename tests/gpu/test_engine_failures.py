"""A step that goes wrong ends its turns, and nothing else."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from app.domain.errors import EngineError
from app.domain.values import SessionId, StopRule, Ticket
from app.gpu.device import hardware
from app.gpu.device.hardware import DeviceLost
from app.messages import Event, Failed, Open, Submit, Token, TurnFinished
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import GREEDY, Driver
from tests.gpu.oracle import greedy_tokens as expected
from tests.gpu.tiny_engine import driver, make_engine, model, oracle, prompt

__all__ = ["driver", "model", "oracle"]


def raise_cuda_error(*_: object) -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("head", "says"),
    [(lambda *_: 1 / 0, "division"), (raise_cuda_error, "illegal memory access")],
    ids=["bug", "device"],
)
def test_a_step_that_fails_ends_its_turns_and_leaves_the_engine_running(
    driver: Driver, oracle: Any, head: Callable[..., object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = driver.open()
    first = driver.answer(session, prompt(3, 6), 4)
    before = prompt(3, 6) + driver.tokens(first)
    turn = driver.submit(session, prompt(9, 6), 10)
    with monkeypatch.context() as patch:
        patch.setattr(driver.runner.stack, "head", head)
        [failed] = driver.engine.step()[-1:]
    assert isinstance(failed, Failed)
    assert (failed.ticket, says in str(failed.error)) == (turn, True)
    again = driver.answer(session, [4], 5, GREEDY)
    assert driver.tokens(again) == expected(oracle, [*before, 4], 5)


def test_a_device_that_does_not_recover_ends_the_engine(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.submit(driver.open(), prompt(3, 6), 4)
    monkeypatch.setattr(driver.runner.stack, "head", raise_cuda_error)
    monkeypatch.setattr(hardware, "probe", raise_cuda_error)
    with pytest.raises(DeviceLost, match="does not recover: CUDA error: an illegal memory access"):
        driver.engine.step()


def test_a_step_that_cannot_be_planned_fails_its_turns_and_leaves_the_engine_running(
    model: ResolvedModel, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, failures = make_engine(model), iter([True])
    plan, names = engine._scheduler.plan, [SessionId(f"s{number}") for number in range(3)]
    monkeypatch.setattr(engine._scheduler, "plan", lambda: 1 / 0 if next(failures, False) else plan())
    for number, name in enumerate(names):
        engine.send(Open(Ticket(number), name))
        engine.send(Submit(Ticket(10 + number), name, tuple(prompt(9, 6)), GREEDY, StopRule(10)))
    failed, said = list[Failed](), list[int]()

    def deliver(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Failed):
                failed.append(event)
                if len(failed) == len(names):
                    engine.send(Submit(Ticket(20), names[0], (4, 5), GREEDY, StopRule(5)))
            elif isinstance(event, Token):
                said.append(event.token_id)
            elif isinstance(event, TurnFinished):
                engine.stop()

    engine.run(deliver)
    assert {each.ticket for each in failed} == {Ticket(10 + number) for number in range(3)}
    assert all(isinstance(each.error, EngineError) and "division" in each.error.message for each in failed)
    assert said == expected(oracle, [4, 5], 5)


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
    driver.check()
    again = driver.submit(session, [4], 5)
    driver.finish(again, *others.values())
    assert driver.tokens(again) == expected(oracle, [*before, 4], 5)
    for seed, other in others.items():
        assert driver.tokens(other) == expected(oracle, prompt(seed, 6), 30)
