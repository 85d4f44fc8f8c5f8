"""When clients hear of tokens while weights are streamed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.domain.values import KVPolicy, SessionId, StopRule, Ticket
from app.gpu.step.launched import LaunchedStep, WholeStep
from app.messages import Event, Open, Submit, Token, TurnFinished
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.conversations import GREEDY
from tests.gpu.weight_ring.streaming import streaming


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
