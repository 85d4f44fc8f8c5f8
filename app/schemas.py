"""What a client may ask of sessions and turns. Every field is implemented or refused; none is ignored."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from app.domain import SamplingParams, SessionState, StopRule
from app.errors import FieldOutOfRange

MAX_SEED = 2**63 - 1

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
StopStrings = Annotated[
    Annotated[StopString, Tag("one string")] | Annotated[list[StopString], Field(max_length=16), Tag("some strings")],
    Discriminator(lambda value: "some strings" if isinstance(value, list) else "one string"),
]
MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]
"""The client's own labels, kept and returned as they came: OpenAI's limits."""


class WireModel(BaseModel):
    """Base of every request body: an unknown field, a wrong type and a NaN are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class SamplingFields(WireModel):
    """How to choose tokens and when to stop: the fields that every generating route shares."""

    max_tokens: int | None = Field(
        None, ge=0, description="most tokens to generate (default: what the context has room for)"
    )
    temperature: float = Field(1.0, ge=0, le=100, description="under 0.00001 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 or -1: off")
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="drawn by the server if absent")
    stop: StopStrings | None = Field(None, description="strings that end the turn; the text ends before them")
    stop_token_ids: list[TokenId] = Field(default=[], max_length=64)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, description="no stop token is sampled before this many tokens")
    logit_bias: dict[Annotated[TokenId, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="token id to a value that is added to its logit", max_length=1024
    )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever form it came in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def to_params(self, *, logprobs: int | None = None, prompt_logprobs: int | None = None) -> SamplingParams:
        """The engine's sampling parameters; draws the seed if the client gave none."""
        return SamplingParams(
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def to_stop_rule(self, *, max_tokens: int, eos_token_ids: frozenset[int]) -> StopRule:
        """The engine's stop rule. `max_tokens` is what the caller made of the field or of its absence."""
        if self.min_tokens > max_tokens:
            raise FieldOutOfRange(f"min_tokens must be at most max_tokens, {max_tokens}", param="min_tokens")
        eos = frozenset() if self.ignore_eos else eos_token_ids
        return StopRule(max_tokens, self.min_tokens, eos | frozenset(self.stop_token_ids))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `FieldOutOfRange` if a token id of these fields is not in the vocabulary."""
        check_token_ids(self.stop_token_ids, vocab_size, param="stop_token_ids")
        check_token_ids(self.logit_bias or (), vocab_size, param="logit_bias")


def check_token_ids(token_ids: Iterable[int], vocab_size: int, *, param: str) -> None:
    """Raise `FieldOutOfRange` unless every id is in the vocabulary."""
    wrong = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
    if wrong is not None:
        raise FieldOutOfRange(f"{param}: token id {wrong} must be at most {vocab_size - 1}", param=param)


class ChatMessage(WireModel):
    """One new message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class GenerateBody(SamplingFields):
    """One turn. Exactly one of `prompt`, `messages` and `token_ids` says what is new since the last turn."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    token_ids: list[TokenId] | None = Field(None, description="[] goes on from the history as it is")
    logprobs: int | None = Field(None, ge=0, le=20, description="alternatives to report for each generated token")
    stream: bool = Field(False, description="answer with server-sent events")

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        given = self._inputs()
        if len(given) != 1:
            raise ValueError(f"give exactly one of prompt, messages and token_ids, not {' and '.join(given) or 'none'}")
        return self

    @property
    def input_field(self) -> str:
        """Name of the field that says what is new."""
        return self._inputs()[0]

    def _inputs(self) -> list[str]:
        return [name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None]


def _explain_residency(value: object) -> object:
    if value == "guaranteed":
        raise ValueError(
            "guaranteed residency needs memory tiers, which this server does not have; allowed: best_effort"
        )
    return value


class CreateSessionBody(WireModel):
    """A new session."""

    metadata: Metadata = Field(default={})
    ttl_s: int | None = Field(
        None, ge=1, le=30 * 24 * 3600, description="closes after this many seconds without a turn"
    )
    residency: Annotated[Literal["best_effort"], BeforeValidator(_explain_residency)] = Field(
        "best_effort",
        description="KV gives way to other sessions when memory runs short, and is computed again",
    )


class RewindBody(WireModel):
    """Where to cut the history."""

    to_token: int = Field(ge=0, description="position of the first token to drop")


class ListSessionsQuery(WireModel):
    """Which sessions to list."""

    model_config = ConfigDict(strict=False)

    limit: int = Field(20, ge=1, le=100)
    after: str = Field("", description="id of the last session of the page before")
    state: SessionState | None = None


class EstimateQuery(WireModel):
    """The size of the session to estimate."""

    model_config = ConfigDict(strict=False)

    tokens: int = Field(ge=1, le=10**9)
