"""Bodies about turns, the form that their text must have, the events of a streamed one, and what probes and
dictionaries read inside the model meanwhile: answers of other APIs tell that in a field `djinn`.
"""

import json
import math
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import TypeAliasType

from app.domain.errors import FieldOutOfRange
from app.domain.text import MAX_NESTING, is_nested_too_deep
from app.domain.values import (
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingDefaults,
    SamplingParams,
    StopRule,
)
from app.grammars.schemas import without_silent
from app.messages import Featured, Probed, Reading
from app.text.generation import TextRule
from app.wire.base import (
    MAX_COUNT,
    ErrorDetail,
    LongList,
    TextOrList,
    TokenId,
    View,
    WireModel,
    any_event,
    check_token_ids,
    is_none,
    shape,
)
from app.wire.checkpoint import CheckpointView


def finite(value: float) -> float | None:
    """The value, or null in JSON if it is not finite."""
    return value if math.isfinite(value) else None


class ProbeReading(View):
    """What a probe has found at `positions` of the history: a value for each; null where it is not finite."""

    probe: str
    positions: list[int]
    values: list[Annotated[float | None, BeforeValidator(finite)]]
    halts: bool = Field(description="whether the turn stops or pauses for it")


class FeatureActivation(BaseModel):
    """How active a feature is."""

    index: int
    activation: float | None = Field(description="null if it is not finite")


class FeaturesReading(BaseModel):
    """The most active features of a dictionary at `positions` of the history: for each position a list, the most active
    first, without those that are not active.
    """

    dictionary: str
    positions: list[int]
    top: list[list[FeatureActivation]]

    @classmethod
    def of(cls, found: Featured) -> Self:
        """The wire form of what was found."""
        top = [
            [FeatureActivation(index=index, activation=finite(value)) for index, value in each] for each in found.top
        ]
        return cls(dictionary=found.dictionary, positions=list(found.positions), top=top)


def event_of(found: Reading) -> tuple[str, BaseModel]:
    """The name of the event that tells of it, and its data."""
    if isinstance(found, Probed):
        return "probe", ProbeReading.model_validate(found)
    return "features", FeaturesReading.of(found)


def by_kind(readings: Iterable[Reading]) -> dict[str, Any]:
    """`probes` and `features`, as far as there are any, as answers have them beside the tokens."""
    found = dict[str, list[BaseModel]]()
    for reading in readings:
        kind, view = event_of(reading)
        found.setdefault("probes" if kind == "probe" else kind, []).append(view)
    return found


def djinn_of(readings: Iterable[Reading]) -> dict[str, Any]:
    """The same, in the field `djinn` of an answer of another API."""
    found = {kind: [each.model_dump() for each in views] for kind, views in by_kind(readings).items()}
    return {"djinn": found} if found else {}


class Djinn(BaseModel):
    """What only this server tells of an answer."""

    recomputed_because: str | None = Field(
        None, exclude_if=is_none, description="where the prompt first differs from the session's history"
    )
    probes: list[ProbeReading] | None = Field(
        None,
        exclude_if=is_none,
        description="what the session's probes have found, of all choices; in a stream, lately",
    )
    features: list[FeaturesReading] | None = Field(
        None,
        exclude_if=is_none,
        description="the most active features of the dictionaries that the session reads; in a stream, lately",
    )


DJINN: dict[str, Any] = {
    "djinn": (
        Djinn | None,
        Field(
            None,
            exclude_if=is_none,
            description="if a history was not kept to its end, or probes or features are there",
        ),
    )
}


ANY_OBJECT = '{"type":"object"}'
MAX_CHOICES = 10_000
Choices = Annotated[LongList[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(WireModel):
    """Exactly one of the fields says what the whole text must match."""

    model_config = ConfigDict(serialize_by_alias=True)

    json_schema: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema, or its text")
    regex: str | None = Field(None, description="a regular expression, which the whole text matches")
    choice: Choices | None = Field(None, description="the text is one of these")
    grammar: str | None = Field(None, description="a context-free grammar in llguidance's variant of Lark's syntax")
    json_object: bool | None = Field(None, description="true: any JSON object")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = list(self._forms())
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise FieldOutOfRange.at(
                "structured_outputs", f"give exactly one of json, regex, choice, grammar and json_object, not {found}"
            )
        if isinstance(self.json_schema, str) and is_nested_too_deep(self.json_schema):
            name = "structured_outputs.json"
            raise FieldOutOfRange.at(name, f"the schema is nested too deep: at most {MAX_NESTING} levels")
        return self

    @classmethod
    def of(cls, grammar: Grammar) -> Self:
        """The form that leads to this grammar."""
        text = grammar.text
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return cls(json=text)
            case GrammarKind.REGEX:
                return cls(regex=text)
            case GrammarKind.CHOICE:
                return cls(choice=json.loads(text))
            case GrammarKind.LARK:
                return cls(grammar=text)

    def to_grammar(self) -> Grammar:
        """The engine's grammar."""
        ((name, (kind, text)),) = self._forms().items()
        return Grammar(kind, text, f"structured_outputs.{name}")

    def _forms(self) -> dict[str, tuple[GrammarKind, str]]:
        forms = {}
        if self.json_schema is not None:
            forms["json"] = GrammarKind.JSON_SCHEMA, schema_text(self.json_schema)
        if self.regex is not None:
            forms["regex"] = GrammarKind.REGEX, self.regex
        if self.choice is not None:
            forms["choice"] = GrammarKind.CHOICE, json.dumps(self.choice)
        if self.grammar is not None:
            forms["grammar"] = GrammarKind.LARK, self.grammar
        if self.json_object:
            forms["json_object"] = GrammarKind.JSON_SCHEMA, ANY_OBJECT
        return forms


def schema_text(schema: dict[str, Any] | str) -> str:
    """A JSON schema as text, `without_silent` keywords; one that is a text stays as it is. Its properties keep their
    order, which is the answer's.
    """
    return schema if isinstance(schema, str) else json.dumps(without_silent(schema))


def json_form(schema: dict[str, Any] | None, field: str) -> Grammar:
    """The form of JSON that matches the schema, which `field` asks for; without one it is any object."""
    return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT if schema is None else schema_text(schema), field)


MAX_SEED = 2**63 - 1
OF_THE_MODEL = "(default: the model's, see /v1/models)"
WITH_DEFAULTS = [field.name for field in fields(SamplingDefaults)]

StopString = Annotated[str, Field(min_length=1, max_length=1000)]
StopStrings = TypeAliasType("StopStrings", TextOrList[StopString, Annotated[list[StopString], Field(max_length=16)]])


def _read_token_id(key: object) -> object:
    """A token id from a JSON key, which is always text. Each has one spelling, so that none is given twice."""
    if not isinstance(key, str):
        return key
    if not re.fullmatch(r"0|[1-9]\d{0,9}", key, re.ASCII):
        raise ValueError("a token id is written in decimal digits, without leading zeros")
    return int(key)


TokenIdKey = Annotated[TokenId, BeforeValidator(_read_token_id)]


class SamplingFields(WireModel):
    """How to choose tokens and when to stop: the fields that every generating route shares."""

    max_tokens: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="most tokens to generate (default: what the context has room for)"
    )
    temperature: float | None = Field(None, ge=0, le=100, description=f"under 0.00001 is greedy {OF_THE_MODEL}")
    top_p: float | None = Field(None, ge=0, le=1, description=f"0: the most likely token; 1: off {OF_THE_MODEL}")
    top_k: int | None = Field(None, ge=-1, le=MAX_COUNT, description=f"0 or -1: off {OF_THE_MODEL}")
    min_p: float | None = Field(None, ge=0, le=1, description=f"0: off {OF_THE_MODEL}")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description=f"1: off {OF_THE_MODEL}")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="drawn by the server if absent")
    stop: StopStrings | None = Field(None, description="strings that end the turn; the text ends before them")
    stop_token_ids: list[TokenId] = Field(default=[], max_length=64)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=MAX_COUNT, description="no stop token is sampled before this many tokens")
    logit_bias: dict[TokenIdKey, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="token id to a value that is added to its logit", max_length=1024
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="the form that the text must have")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever form it came in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, defaults: SamplingDefaults) -> SamplingDefaults:
        """The fields that have defaults of the model's; those that the client left out are as `defaults` say."""
        given = {name: getattr(self, name) for name in WITH_DEFAULTS}
        chosen = replace(defaults, **{name: value for name, value in given.items() if value is not None})
        return replace(chosen, top_k=max(chosen.top_k, 0))

    def to_params(
        self, defaults: SamplingDefaults, *, logprobs: int | None = None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """The engine's sampling parameters. The seed is drawn if the client gave none."""
        return SamplingParams(
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            **asdict(self.sampling(defaults)),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=self.to_grammar(),
        )

    def to_grammar(self) -> Grammar | None:
        """What the text must match; None if any will do."""
        return None if self.structured_outputs is None else self.structured_outputs.to_grammar()

    def to_stop_rule(self, *, max_tokens: int, eos_token_ids: frozenset[int]) -> StopRule:
        """The engine's stop rule. `max_tokens` is what the caller made of the field or of its absence."""
        if self.min_tokens > max_tokens:
            raise FieldOutOfRange(f"min_tokens must be at most max_tokens, {max_tokens}", param="min_tokens")
        eos = frozenset() if self.ignore_eos else eos_token_ids
        return StopRule(max_tokens, self.min_tokens, eos | frozenset(self.stop_token_ids))

    def to_text_rule(self, *, logprobs: int | None = None) -> TextRule:
        """How the turn's text is read; its reader keeps so many alternatives of each token."""
        return TextRule(self.stop_strings, self.min_tokens, logprobs)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `FieldOutOfRange` if a token id of these fields is not in the vocabulary."""
        check_token_ids(self.stop_token_ids, vocab_size, param="stop_token_ids")
        check_token_ids(self.logit_bias or (), vocab_size, param="logit_bias")


class ChatMessage(WireModel):
    """One new message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class GenerateBody(SamplingFields):
    """One turn. Exactly one of `prompt`, `messages` and `token_ids` says what is new since the last turn."""

    prompt: str | None = None
    messages: LongList[ChatMessage] | None = Field(None, min_length=1)
    token_ids: LongList[TokenId] | None = Field(None, description="[] goes on from the history as it is")
    logprobs: int | None = Field(None, ge=0, le=20, description="alternatives to report for each generated token")
    stream: bool = Field(False, description="answer with server-sent events")

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        given = self._inputs()
        if len(given) != 1:
            raise FieldOutOfRange(
                f"give exactly one of prompt, messages and token_ids, not {' and '.join(given) or 'none'}",
                param=given[-1] if given else None,
            )
        return self

    @property
    def input_field(self) -> str:
        """Name of the field that says what is new."""
        return self._inputs()[0]

    def _inputs(self) -> list[str]:
        return [name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None]


class AlternativeView(BaseModel):
    """A token that could stand at a position, with its natural-log probability."""

    token_id: int
    logprob: float


class TokenLogprobsView(AlternativeView):
    """The token that stands at a position, and the most likely ones there, best first."""

    top: list[AlternativeView]


class TurnUsageView(View):
    """What a turn cost, in tokens; `prompt_tokens` is the whole context that it started from."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_recomputed: int


class TurnView(BaseModel):
    """A turn that is over, or the whole of one up to where it is paused: then it has a `checkpoint` and no
    `finish_reason`. `logprobs` is there if the request that began it asked for it.
    """

    status: Literal["finished", "paused"]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    usage: TurnUsageView
    checkpoint: CheckpointView | None
    probes: list[ProbeReading] | None = Field(
        None, exclude_if=is_none, description="what probes have found in the whole turn, if any are armed"
    )
    features: list[FeaturesReading] | None = Field(
        None, exclude_if=is_none, description="the most active features in the whole turn, if any are read"
    )
    logprobs: list[TokenLogprobsView] | None = Field(None, exclude_if=is_none)


class TokenEvent(BaseModel):
    """Data of a `token` event. Text can lag behind the tokens while a character or a stop string is incomplete."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobsView] | None = Field(None, exclude_if=is_none)


_DONE = "with `not_durable`: the answer of the turn, which is in the session's history"
TurnErrorBody = shape(
    "TurnErrorBody",
    "The error body of a route that answers with a turn.",
    {"error": ErrorDetail, "turn": (TurnView | None, Field(None, description=_DONE))},
)
TurnEvent = any_event(
    "TurnEvent",
    ("token", "TurnTokenEvent", "Tokens that have been generated.", TokenEvent),
    ("probe", "TurnProbeEvent", "What a probe has found, before the next token.", ProbeReading),
    ("features", "TurnFeaturesEvent", "The most active features, before the next token.", FeaturesReading),
    ("paused", "TurnPausedEvent", "The last event of a turn that has paused.", TurnView),
    ("finished", "TurnFinishedEvent", "The last event of a turn that is over.", TurnView),
    ("error", "TurnErrorEvent", "The last event of a turn that has failed.", TurnErrorBody),
)
"""One server-sent event of a streamed turn."""
