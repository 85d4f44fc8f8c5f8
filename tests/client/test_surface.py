"""What users may rely on is what they get."""

from __future__ import annotations

import inspect
import subprocess
import sys
from enum import StrEnum
from typing import get_args

import pytest
from pydantic import BaseModel

import app.domain.breakpoints
import client
from app.domain import values as domain
from app.openai.models import Model
from app.wire import breakpoints, checkpoint, memory, sessions, turns, vectors
from app.wire import sessions as history
from app.wire.sessions import ListSessionsQuery
from app.wire.turns import GenerateBody
from client import breakpoint_models, calls, memory_models, models
from client.answer import Answer


def test_public_names() -> None:
    public = {name for name, value in vars(client).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == set(client.__all__)


def test_importing_the_client_imports_neither_server_nor_torch() -> None:
    code = "import sys, client; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "httpx" in loaded
    assert not {"app", "torch", "fastapi"} & set(loaded)


@pytest.mark.parametrize("name", [name for name in client.__all__ if name.startswith("Async")])
def test_both_clients_offer_the_same(name: str) -> None:
    assert _offer(getattr(client, name)) == _offer(getattr(client, name.removeprefix("Async")))


def _offer(kind: type) -> dict[str, list[str]]:
    """Public methods and their parameters."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {name: list(inspect.signature(method).parameters) for name, method in methods if name[0] != "_"}


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (models.SessionState, domain.SessionState),
        (models.Phase, domain.Phase),
        (models.Tier, domain.Tier),
        (models.Residency, domain.Residency),
        (models.FinishReason, domain.FinishReason),
        (breakpoint_models.Pass, app.domain.breakpoints.Pass),
        (breakpoint_models.Action, app.domain.breakpoints.Action),
        (breakpoint_models.Op, app.domain.breakpoints.EditOp),
        (breakpoint_models.OnTimeout, app.domain.breakpoints.OnTimeout),
    ],
)
def test_the_client_knows_every_word_of_the_server(known: object, words: type[StrEnum]) -> None:
    assert set(get_args(known)) == set(words)


def test_a_turn_takes_every_field_that_the_server_does() -> None:
    assert set(calls.TurnOptions.__annotations__) == set(GenerateBody.model_fields) - {"stream"}


def test_the_page_size_is_the_most_that_the_server_gives() -> None:
    ListSessionsQuery(limit=calls.PAGE_SIZE)
    with pytest.raises(ValueError, match="limit"):
        ListSessionsQuery(limit=calls.PAGE_SIZE + 1)


@pytest.mark.parametrize(
    ("answer", "view", "left_out"),
    [
        (models.SessionInfo, sessions.SessionView, set()),
        (models.KV, sessions.KVView, set()),
        (models.SessionUsage, sessions.SessionUsageView, set()),
        (models.ResumeTimes, sessions.ResumeTimes, set()),
        (models.History, history.HistoryView, set()),
        (models.SessionPage, sessions.SessionPage, set()),
        (models.Turn, turns.TurnView, set()),
        (models.Usage, turns.TurnUsageView, set()),
        (models.TokenEvent, turns.TokenEvent, set()),
        (models.TokenLogprobs, turns.TokenLogprobsView, set()),
        (models.PhaseChange, sessions.PhaseView, set()),
        (models.Moving, sessions.MovingView, set()),
        (breakpoint_models.CheckpointInfo, checkpoint.CheckpointView, set()),
        (breakpoint_models.Lens, checkpoint.LensView, set()),
        (breakpoint_models.LensPosition, checkpoint.LensPositionView, set()),
        (breakpoint_models.Guess, checkpoint.LensTokenView, set()),
        (breakpoint_models.BreakpointInfo, breakpoints.BreakpointView, set()),
        (breakpoint_models.When, breakpoints.WhenView, set()),
        (breakpoint_models.EditInfo, breakpoints.EditView, set()),
        (breakpoint_models.EditVector, breakpoints.EditVectorView, set()),
        (breakpoint_models.VectorInfo, vectors.VectorView, set()),
        (memory_models.MemoryMap, memory.MemoryView, set()),
        (memory_models.Data, memory.DataView, set()),
        (memory_models.TierUse, memory.TierView, set()),
        (memory_models.Stack, memory.StackView, set()),
        (memory_models.Moves, memory.MovesView, set()),
        (memory_models.Counts, memory.CountsView, set()),
        (models.Model, Model, {"object", "created", "owned_by"}),
    ],
)
def test_every_field_of_an_answer_reaches_the_user(
    answer: type[Answer], view: type[BaseModel], left_out: set[str]
) -> None:
    """A model's OpenAI head says nothing about the server."""
    assert set(answer.model_fields) == set(view.model_fields) - left_out
