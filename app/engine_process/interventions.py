"""Interventions as they are sent: thousands may be of one edit, and many edits have one vector, which goes once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from app.domain.activations import PausedTurn
from app.domain.breakpoints import ALL, Edit, EditOp, Intervention, Positions, TensorData
from app.domain.positions import Run
from app.messages import Open, ReceiveKV, Reinstate, TurnFinished

T = TypeVar("T")
Interventions = tuple[Intervention, ...]
SentEdit = tuple[EditOp, float, int | None, Positions | None, float | None]
"""The fields of an edit; its vector by its number, and None for all positions."""
SentIntervention = tuple[int, int, int, int, tuple[Run, ...]]
"""The fields of an intervention; its edit by its number."""
Sent = tuple[list[TensorData], list[SentEdit], list[list[SentIntervention]]]


def take_out(value: T) -> tuple[T, Sent | None]:
    """What is sent of `value`, and its interventions beside it, if it has any."""
    if isinstance(value, Reinstate):
        paused = value.paused
        bare = replace(value, interventions=(), paused=None if paused is None else replace(paused, interventions=()))
        return bare, pack(value.interventions, () if paused is None else paused.interventions)
    if isinstance(value, Open | PausedTurn | ReceiveKV | TurnFinished) and value.interventions:
        return replace(value, interventions=()), pack(value.interventions)
    return value, None


def put_back(value: T, plain: Any) -> T:
    """The value that `take_out` was given. Raises `msgspec.MsgspecError` or `IndexError` for what it has not made."""
    first, *others = unpack(plain)
    if isinstance(value, Reinstate):
        [second] = others
        paused = None if value.paused is None else replace(value.paused, interventions=second)
        return replace(value, interventions=first, paused=paused)
    assert isinstance(value, Open | PausedTurn | ReceiveKV | TurnFinished)
    return replace(value, interventions=first)


def pack(*lists: Interventions) -> Sent:
    """Lists of interventions that share edits and vectors."""
    vectors, edits, sent = dict[TensorData, int](), list[SentEdit](), list[list[SentIntervention]]()
    numbers = dict[int, int]()
    """Of edits, by their identity: to compare each would take long."""
    for made in lists:
        for key, edit in {id(each.edit): each.edit for each in made}.items():
            if key not in numbers:
                numbers[key] = len(edits)
                vector = None if edit.vector is None else vectors.setdefault(edit.vector, len(vectors))
                positions = None if edit.positions is ALL else edit.positions
                edits.append((edit.op, edit.factor, vector, positions, edit.max_norm))
        sent.append([(each.first, each.end, each.boundary, numbers[id(each.edit)], each.only) for each in made])
    return list(vectors), edits, sent


def unpack(plain: Any) -> Iterator[Interventions]:
    """The lists again; equal edits are one object, and so are equal vectors."""
    vectors, sent_edits, lists = msgspec.convert(plain, Sent)
    edits = [
        Edit(op, factor, None if vector is None else vectors[vector], positions or ALL, max_norm)
        for op, factor, vector, positions, max_norm in sent_edits
    ]
    for made in lists:
        yield tuple([Intervention(first, end, at, edits[number], only) for first, end, at, number, only in made])
