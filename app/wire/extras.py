"""Fields of a body that a route does not declare: named in the answer, or refused."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict, model_validator

from app.domain.errors import FieldOutOfRange
from app.wire.base import WireModel


def _allow_null(schema: dict[str, Any]) -> None:
    """Say in the JSON schema what `OpenBody` does with nulls."""
    fields: dict[str, dict[str, Any]] = schema["properties"]
    for name in fields.keys() - set(schema.get("required", ())):
        about = {key: value for key, value in fields[name].items() if key in ("title", "description", "default")}
        rest = {key: value for key, value in fields[name].items() if key not in about}
        fields[name] = about | {"anyOf": [rest, {"type": "null"}]}


class OpenBody(WireModel):
    """A body, or an object in one, that keeps unknown fields in `model_extra`; `IgnoredFields` accounts for them.

    Its optional fields may also be null, which means the same as leaving them out. The OpenAI API documents nearly all
    of its fields so, and SDK users pass `None` to them.
    """

    model_config = ConfigDict(json_schema_extra=_allow_null, extra="allow")

    place: ClassVar[str] = ""
    """Of a whole body: its part of the table of unsupported fields."""
    reads_extras: ClassVar[bool] = False
    """Whether unknown fields have a reader, who then tells which of them change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in body.items() if value is not None or name not in optional}

    def without_effect(self) -> Iterable[str]:
        """The declared fields that change nothing beside the others of this body."""
        return ()


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A known field without effect. With a `reason`, a call that asks for it is refused; else it is answered.

    Null and the `neutral` values ask for nothing.
    """

    neutral: tuple[object, ...] = ()
    reason: str | None = None

    def asks_for(self, value: object) -> bool:
        """Whether `value` asks for something."""
        return value is not None and value not in self.neutral


TEXT_ONLY = "the models here read and write text"
NO_FORM = "the answer would not have that form"
DEPRECATED = "deprecated in favour of tools, and not supported"
OWN_TEMPLATE = "a chat is written in the model's own template"

ANTHROPIC = "anthropic"
"""The place of the bodies of Anthropic's API."""
RESPONSES = "responses"
"""The place of the bodies of `/v1/responses`."""

UNSUPPORTED: dict[str, dict[str, Unsupported]] = {
    "": {
        "add_generation_prompt": Unsupported((True,), OWN_TEMPLATE),
        "allowed_token_ids": Unsupported((), "use logit_bias"),
        "audio": Unsupported((), TEXT_ONLY),
        "bad_words": Unsupported(([],), "use logit_bias"),
        "best_of": Unsupported((1,), "every generated choice is returned; use n"),
        "chat_template": Unsupported((), OWN_TEMPLATE),
        "continue_final_message": Unsupported((False,), OWN_TEMPLATE),
        "documents": Unsupported(([],), OWN_TEMPLATE),
        "echo": Unsupported((False,), "only /v1/completions repeats the prompt"),
        "function_call": Unsupported(("none", "auto"), DEPRECATED),
        "functions": Unsupported(([],), DEPRECATED),
        "grammar": Unsupported(("",), NO_FORM),
        "guided_choice": Unsupported((), NO_FORM),
        "guided_grammar": Unsupported((), NO_FORM),
        "guided_json": Unsupported((), NO_FORM),
        "guided_regex": Unsupported((), NO_FORM),
        "include_stop_str_in_output": Unsupported((False,), "the text ends before the stop string"),
        "json_schema": Unsupported((), NO_FORM),
        "modalities": Unsupported((["text"],), TEXT_ONLY),
        "prediction": Unsupported((), "the server takes no predicted text"),
        "prompt_embeds": Unsupported((), "a prompt is a text or token ids"),
        "prompt_logprobs": Unsupported((), "use echo and logprobs of /v1/completions"),
        "response_format": Unsupported(({"type": "text"},), NO_FORM),
        "skip_special_tokens": Unsupported((True,), "the text has no special tokens; use return_token_ids"),
        "suffix": Unsupported(("",), "text cannot be generated in front of other text"),
        "truncate_prompt_tokens": Unsupported((), "the server never shortens a prompt"),
        "use_beam_search": Unsupported((False,), "tokens are sampled one by one"),
        "web_search_options": Unsupported((), "the server cannot search the web"),
        "cache_prompt": Unsupported((True,)),
        "cache_salt": Unsupported(),
        "chat_template_kwargs": Unsupported(({},)),
        "id_slot": Unsupported((-1,)),
        "metadata": Unsupported(({},)),
        "priority": Unsupported((0,)),
        "prompt_cache_key": Unsupported(),
        "prompt_cache_retention": Unsupported(),
        "reasoning_effort": Unsupported(("none",)),
        "request_id": Unsupported(),
        "safety_identifier": Unsupported(),
        "service_tier": Unsupported(("auto", "default")),
        "store": Unsupported((False,)),
        "timings_per_token": Unsupported((False,)),
        "verbosity": Unsupported(("medium",)),
    },
    "stream_options": {
        "continuous_usage_stats": Unsupported(),
        "include_obfuscation": Unsupported((False,), "events are never padded"),
    },
    "messages": {
        "annotations": Unsupported(([],)),
        "audio": Unsupported((), TEXT_ONLY),
        "function_call": Unsupported((), DEPRECATED),
        "name": Unsupported(),
        "reasoning": Unsupported(("",)),
        "reasoning_content": Unsupported(("",)),
    },
    "messages.content": {"cache_control": Unsupported()},
    "messages.tool_calls": {"index": Unsupported()},
    ANTHROPIC: {
        "cache_control": Unsupported(),
        "container": Unsupported((), "the server runs no code"),
        "context_management": Unsupported(({},)),
        "diagnostics": Unsupported(({},)),
        "inference_geo": Unsupported(),
        "mcp_servers": Unsupported(([],), "the server calls no tools"),
        "service_tier": Unsupported(("auto", "standard_only")),
        "speed": Unsupported(("standard",)),
    },
    f"{ANTHROPIC}.output_config": {"effort": Unsupported()},
    f"{ANTHROPIC}.system": {"cache_control": Unsupported(), "citations": Unsupported(([],))},
    f"{ANTHROPIC}.tools": {
        "allowed_callers": Unsupported((["direct"],)),
        "cache_control": Unsupported(),
        "defer_loading": Unsupported((False,)),
        "eager_input_streaming": Unsupported((False, True)),
        "input_examples": Unsupported(([],)),
    },
    f"{ANTHROPIC}.messages.content": {
        "cache_control": Unsupported(),
        "caller": Unsupported(({"type": "direct"},)),
        "citations": Unsupported(([],)),
    },
    f"{ANTHROPIC}.messages.content.content": {"cache_control": Unsupported()},
    RESPONSES: {
        "context_management": Unsupported(([],), "the server never shortens a conversation"),
        "conversation": Unsupported((), "use previous_response_id"),
        "generate": Unsupported((True,), "the server cannot prepare a response without generating it"),
        "moderation": Unsupported((), "the server moderates nothing"),
        "prompt": Unsupported((), "the server keeps no prompt templates"),
        "stream_id": Unsupported((), "a connection runs one response at a time"),
        "image": Unsupported(),
        "access_programs": Unsupported(),
        "max_tool_calls": Unsupported(),
        "prompt_cache_key": Unsupported(),
        "prompt_cache_options": Unsupported(({},)),
        "prompt_cache_retention": Unsupported(),
        "reasoning": Unsupported(({},)),
        "safety_identifier": Unsupported(),
        "service_tier": Unsupported(("auto", "default")),
    },
    f"{RESPONSES}.stream_options": {"include_obfuscation": Unsupported((False,), "events are never padded")},
    f"{RESPONSES}.text": {"verbosity": Unsupported(("medium",))},
    f"{RESPONSES}.tools": {
        "allowed_callers": Unsupported((["direct"],)),
        "async": Unsupported((False,)),
        "defer_loading": Unsupported((False,)),
        "output_schema": Unsupported(),
    },
    f"{RESPONSES}.input": {
        "caller": Unsupported(({"type": "direct"},)),
        "name": Unsupported(),
        "namespace": Unsupported(),
    },
    f"{RESPONSES}.input.content": {
        "annotations": Unsupported(([],)),
        "logprobs": Unsupported(([],)),
        "prompt_cache_breakpoint": Unsupported(),
    },
}
"""By the path of the object that has them, without the indices of lists. `""` is the body itself.

A body that declares a field of one of these names supports it: then the entry says nothing about that body.
"""

NOTHING_KNOWN: dict[str, Unsupported] = {}


def asks_for(place: str, name: str, value: object) -> bool:
    """Whether the field `name` of an object at `place`, which no body declares, asks for something."""
    field = UNSUPPORTED.get(place, NOTHING_KNOWN).get(name)
    return value is not None if field is None else field.asks_for(value)


MAX_NAMED = 20
LONGEST_NAME = 64
OTHER = "other"
_LABELS = frozenset(
    f"{place.removeprefix(ANTHROPIC).removeprefix(RESPONSES)}.{name}".removeprefix(".")
    for place, fields in UNSUPPORTED.items()
    for name in fields
)
_INDEX = re.compile(r"\.\d+(?=\.)")
_UNSAFE = re.compile(r"[^!-+\--~]")
"""Everything but printable ASCII without spaces and commas."""


class IgnoredFields:
    """The fields of one call that change nothing. With `strict`, the first of them is an error."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._paths: list[str] = []
        self._has_more = False

    def read(self, body: OpenBody) -> None:
        """Take the fields of `body` that have no effect.

        Raises `FieldOutOfRange` for one that is known and cannot be honoured.
        """
        for place, path, each in _objects(body, body.place, ""):
            extras = each.model_extra or {}
            _refuse_unsupported(place, path, extras)
            if not each.reads_extras:
                self.add(path + name for name, value in extras.items() if asks_for(place, name, value))
            self.add(path + name for name in each.without_effect())

    def add(self, paths: Iterable[str]) -> None:
        """Take fields by their dotted paths, no more of them than are named. Raises `FieldOutOfRange` if strict."""
        for path in paths:
            if self._strict:
                raise FieldOutOfRange(f"{path}: unknown or without effect, and the server is strict", param=path)
            if len(self._paths) == MAX_NAMED:
                self._has_more = True
                return
            self._paths.append(path)

    @property
    def header(self) -> str:
        """The value of the answer's header; empty if there is nothing to name."""
        named = [_UNSAFE.sub("?", path[:LONGEST_NAME]) or "?" for path in self._paths]
        return ", ".join([*named, "..."] if self._has_more else named)

    def labels(self) -> Iterator[str]:
        """A label for each named field: its path without indices if it is a known one, else `OTHER`."""
        for path in self._paths:
            name = _INDEX.sub("", path)
            yield name if name in _LABELS else OTHER


def _objects(body: OpenBody, place: str, path: str) -> Iterator[tuple[str, str, OpenBody]]:
    """`body` and the objects in it, each with its place, and its path up to the names of its fields."""
    yield place, path, body
    for name in type(body).model_fields:
        value = getattr(body, name)
        inner = f"{place}.{name}".removeprefix(".")
        if isinstance(value, OpenBody):
            yield from _objects(value, inner, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], OpenBody):
            for index, item in enumerate(value):
                yield from _objects(item, inner, f"{path}{name}.{index}.")


def _refuse_unsupported(place: str, path: str, extras: dict[str, object]) -> None:
    if not extras:
        return
    for name, field in UNSUPPORTED.get(place, NOTHING_KNOWN).items():
        if field.reason is not None and name in extras and field.asks_for(extras[name]):
            raise FieldOutOfRange(f"{path}{name}: {field.reason}", param=f"{path}{name}")
