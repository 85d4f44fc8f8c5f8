"""What a session says that pauses, is edited and forked, by a replay of all its tokens without any of that."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from app.domain.breakpoints import Edit, EditOp
from app.domain.values import SessionId
from tests.gpu.breakpoints.breaking import Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, make_tiny
from tests.gpu.breakpoints.breaking_oracle import Where, change_of, hooked

Made = tuple[int, float, int, int]
"""The layer, the factor, and the positions that were scaled by it."""


T = TypeVar("T")


def pick(found: list[T], share: float) -> T:
    """One of a list, whatever its length."""
    return found[int(share * len(found))]


@cache
def tiny() -> TinyModel:
    with tempfile.TemporaryDirectory() as folder:
        return make_tiny("two-layers", Path(folder))


def within(first: int, end: int) -> Where:
    return lambda position, _: first <= position < end


@cache
@torch.no_grad()
def next_token(history: tuple[int, ...], made: tuple[Made, ...]) -> int:
    """What Transformers says after `history`, every position of which is computed at once."""
    changes = [change_of(layer, Edit(EditOp.SCALE, factor), within(first, end)) for layer, factor, first, end in made]
    with hooked(tiny().oracle, changes):
        return int(tiny().oracle(input_ids=torch.tensor([history])).logits[0, -1].argmax())


@dataclass(eq=False)
class Client:
    """What a session is expected to have: all of its history but for the tokens of a turn that has not ended."""

    session: SessionId
    steering: tuple[Made, ...] = ()
    """What is done to all positions from now on. Once it is disarmed, it is among what has been `made`."""
    history: list[int] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    turn: Turn | None = None
    computed: int | None = 0
    """Positions that have had their KV since the history was last cut; None after a cancel: nobody knows."""

    def unmake(self, first: int) -> None:
        """Forget what was made of positions from `first` on: they are gone, or will be computed from scratch."""
        self.made = [(*made[:3], min(made[3], first)) for made in self.made if made[2] < first]

    def replay(self, count: int) -> Iterator[int]:
        history = list(self.history)
        for _ in range(count):
            history.append(next_token(tuple(history), (*self.steering, *self.made)))
            yield history[-1]
