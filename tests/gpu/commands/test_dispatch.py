"""Which code carries out a command is looked up by its type."""

from __future__ import annotations

from typing import get_args

from app.messages import Command
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import Driver
from tests.gpu.tiny_engine import make_engine, model

__all__ = ["model"]


def test_every_command_has_one_handler(model: ResolvedModel) -> None:
    handler = Driver(make_engine(model)).handler
    assert sorted([*handler.on_session, *handler.on_engine], key=str) == sorted(get_args(Command), key=str)
