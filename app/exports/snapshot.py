"""What goes with an exported session beside its history and its KV: the `about` of its file."""

from __future__ import annotations

import json
from array import array
from functools import partial
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from app.domain.activations import CheckpointInfo, PausedTurn
from app.domain.breakpoints import Breakpoint, Intervention, OnTimeout, Swap, TensorData, TensorTable, swapped
from app.domain.text import has_more_values, is_nested_too_deep
from app.domain.values import MAX_LABEL_BYTES, MAX_NAME, NEUTRAL, SamplingParams, StopRule, TokenLogprobs
from app.machine.files import size
from app.messages import ReadPaused
from app.sessions.registry import SessionRegistry
from app.sessions.session import PausedPlace, PauseLimit, Session
from app.text.generation import TextRule
from app.wire.base import MAX_COUNT, TokenId, WireModel
from app.wire.breakpoints import MAX_TIMEOUT_S, MIN_TIMEOUT_S
from app.wire.sessions import SessionLabels
from app.wire.turns import WITH_DEFAULTS, SamplingFields, StructuredOutputs

DIGEST_BYTES = 16
"""Of what stands for a tensor in a snapshot."""


def _fail_fast(schema: Any, handler: GetCoreSchemaHandler, seen: set[int]) -> None:
    """Change the schema, with the dataclasses that it refers to."""
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part, handler, seen)
    elif isinstance(schema, dict):
        if schema.get("type") == "definition-ref":
            _fail_fast(handler.resolve_ref_schema(schema), handler, seen)
        if schema.get("type") in ("list", "tuple"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part, handler, seen)


class _FailsFast(BaseModel):
    """Of each list, only the first wrong value becomes an error: each costs more than a right one."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema, handler, set())
        return schema


class TurnFields(SamplingFields):
    """How the turn goes on: the fields that asked for it, with nothing left to a default."""

    stop_token_ids: list[TokenId] = Field(default=[], max_length=1024)
    logprobs: int | None = Field(None, ge=0, le=20)

    @classmethod
    def of(cls, sampling: SamplingParams, stop: StopRule, rule: TextRule) -> Self:
        """Those that lead to these."""
        penalties = ("presence_penalty", "frequency_penalty")
        return cls(
            **{name: getattr(sampling, name) for name in ("seed", "logprobs", *WITH_DEFAULTS, *penalties)},
            max_tokens=stop.max_tokens,
            stop=list(rule.stop),
            stop_token_ids=sorted(stop.stop_token_ids),
            ignore_eos=True,
            min_tokens=stop.min_tokens,
            logit_bias=dict(sampling.logit_bias),
            structured_outputs=None if sampling.grammar is None else StructuredOutputs.of(sampling.grammar),
        )


class PausedTurnSnapshot(_FailsFast, WireModel):
    """A paused turn, whole. The logarithm of 0 is `-Infinity`; no other number is infinite."""

    model_config = ConfigDict(
        ser_json_bytes="base64", val_json_bytes="base64", allow_inf_nan=True, ser_json_inf_nan="constants"
    )

    prompt_tokens: int = Field(ge=1, le=MAX_COUNT)
    fields: TurnFields
    timeout_s: float = Field(ge=MIN_TIMEOUT_S, le=MAX_TIMEOUT_S)
    on_timeout: OnTimeout
    logprobs: tuple[TokenLogprobs, ...]
    checkpoint: CheckpointInfo
    hidden: TensorData
    interventions: tuple[Intervention, ...]

    @classmethod
    def of(cls, turn: PausedTurn, place: PausedPlace) -> Self:
        """The two halves of the turn as one."""
        return cls(
            prompt_tokens=turn.prompt_tokens,
            fields=TurnFields.of(turn.sampling, turn.stop, place.rule),
            timeout_s=place.limit.timeout_s,
            on_timeout=place.limit.on_timeout,
            logprobs=place.logprobs,
            checkpoint=turn.checkpoint,
            hidden=turn.hidden,
            interventions=turn.interventions,
        )

    def to_turn(self) -> PausedTurn:
        """The engine's part."""
        fields = self.fields
        return PausedTurn(
            fields.to_params(NEUTRAL, logprobs=fields.logprobs),
            fields.to_stop_rule(max_tokens=fields.max_tokens or 0, eos_token_ids=frozenset()),
            self.prompt_tokens,
            self.checkpoint,
            self.hidden,
            self.interventions,
        )

    def to_place(self, history: array[int], before: array[int] | None = None) -> PausedPlace:
        """The event loop's part. If the turn fails here, its context stays, unless it is known what was `before` it."""
        fields = self.fields
        return PausedPlace(
            info=self.checkpoint,
            limit=PauseLimit(self.timeout_s, self.on_timeout),
            rule=fields.to_text_rule(logprobs=fields.logprobs),
            before=history[: self.prompt_tokens] if before is None else before,
            prompt_tokens=self.prompt_tokens,
            max_tokens=fields.max_tokens or 0,
            logprobs=self.logprobs,
        )


class SessionSnapshot(_FailsFast, SessionLabels):
    """What a client says of the session, its breakpoints, and the turn in it if that is paused."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    breakpoints: tuple[Breakpoint, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    turn: PausedTurnSnapshot | None = None
    model: str | None = Field(None, max_length=MAX_NAME)
    """The name of the adapter that the session is computed with; the file has its digest."""
    tensors: tuple[bytes, ...] = ()
    """In the text: what the vectors of all edits have, each once."""

    @classmethod
    def of(cls, session: Session, turn: PausedTurnSnapshot | None) -> Self:
        """That of a session with such a turn in it (None: which is idle)."""
        return cls(
            metadata=session.metadata,
            ttl_s=session.ttl_s,
            model=None if session.adapter is None else session.adapter.name,
            breakpoints=tuple(session.breakpoints.values()),
            interventions=session.settled_interventions,
            turn=turn,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """That of a file. Raises `ValueError` for any other text."""
        snapshot = cls.model_validate_json(text)
        return snapshot._swapped(TensorTable(snapshot.tensors, digest_size=DIGEST_BYTES).get, tensors=())

    def to_json(self) -> str:
        """As a file has it: a digest is in the place of each vector, and the vector in `tensors`."""
        table = TensorTable(digest_size=DIGEST_BYTES)
        snapshot = self._swapped(table.put)
        return snapshot.model_copy(update={"tensors": tuple(table.data.values())}).model_dump_json()

    def _swapped(self, swap: Swap, **changed: object) -> Self:
        turn = self.turn
        if turn is not None:
            made = tuple(swapped(each, swap) for each in turn.interventions)
            turn = turn.model_copy(update={"interventions": made})
        breakpoints = tuple(swapped(each, swap) for each in self.breakpoints)
        interventions = tuple(swapped(each, swap) for each in self.interventions)
        return self.model_copy(
            update={"breakpoints": breakpoints, "interventions": interventions, "turn": turn, **changed}
        )


async def take_snapshot(
    registry: SessionRegistry, session: Session
) -> tuple[SessionSnapshot, PausedTurn | None, PausedPlace | None]:
    """That of the session as it is now, and the two halves of the turn in it if that is paused."""
    place = session.paused_place
    if place is None:
        return SessionSnapshot.of(session, None), None, None
    turn: PausedTurn = await registry.executor.call(partial(ReadPaused, session=session.id))
    return SessionSnapshot.of(session, PausedTurnSnapshot.of(turn, place)), turn, place


MAX_VALUES = 1 << 18
"""Beside those of log-probabilities: 4,096 edits of the session and as many of its turn have about 160,000."""
TOKEN_VALUES = 64
"""Of the log-probabilities of one token, with 20 others."""
MAX_NAMES = 1024
"""In one object: as many as a `logit_bias` has."""


def most_values(tokens: int) -> int:
    """The most values that the snapshot of a session of so many tokens has, lists and objects included."""
    return MAX_VALUES + TOKEN_VALUES * tokens


def has_room(text: bytes, tokens: int) -> bool:
    """Whether a server would import the snapshot of a session of so many tokens."""
    return len(text) <= MAX_LABEL_BYTES and not has_more_values(text, most_values(tokens))


def check_text(text: bytes, tokens: int) -> None:
    """Raise `ValueError` for a text that is no snapshot of a session of so many tokens, or no JSON."""
    if not has_room(text, tokens):
        raise ValueError(f"it may have {size(MAX_LABEL_BYTES)} and {most_values(tokens)} values")
    if not is_nested_too_deep(text):  # which the fields refuse
        json.loads(text, object_pairs_hook=_check_names)


def _check_names(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > MAX_NAMES:
        raise ValueError(f"an object in it has {len(pairs)} names; there may be from 0 to {MAX_NAMES}")
