"""Bodies of OpenAI's and Anthropic's APIs: the fields that a route does not declare, which are named in the answer, or
refused, and what a call asks of its turns, in whichever fields it says so.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, model_validator

from app.domain.errors import FieldOutOfRange
from app.domain.values import Grammar
from app.tools.definitions import ToolUse
from app.tools.support import form_without_effect, loosened
from app.wire.base import WireModel
from app.wire.turns import SamplingFields


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


B = TypeVar("B", bound=OpenBody)


def bare(body: B) -> B:
    """The body without its unknown fields, or those of objects in it: they may be what no answer can have as JSON."""
    if body.model_extra:
        body.model_extra.clear()
    for name in type(body).model_fields:
        value = getattr(body, name)
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, OpenBody):
                bare(each)
    return body


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A known field without effect. With a `reason`, a call that asks for it is refused; else it is answered.

    Null and the `neutral` values ask for nothing. The answer to a value that `is_harmless` is right without it: such a
    call is answered all the same.
    """

    neutral: tuple[object, ...] = ()
    reason: str | None = None
    is_harmless: Callable[[object], bool] = lambda value: False

    def asks_for(self, value: object) -> bool:
        """Whether `value` asks for something."""
        return value is not None and value not in self.neutral

    def refuses(self, value: object) -> bool:
        """Whether a call with `value` is refused."""
        return self.reason is not None and self.asks_for(value) and not self.is_harmless(value)


TEXT_ONLY = "the models here read and write text"
IMAGE_LEFT_OUT = "[An image was left out here: this model reads text only.]"
DOCUMENT_LEFT_OUT = "[A document was left out here: this model reads text only.]"
"""What a model reads in the place of these. A conversation has them in each later call too, and goes on so."""
NO_FORM = "the answer would not have that form"
DEPRECATED = "deprecated in favour of tools, and not supported"
OWN_TEMPLATE = "a chat is written in the model's own template"

ANTHROPIC = "anthropic"
"""The place of the bodies of Anthropic's API."""
RESPONSES = "responses"
"""The place of the bodies of `/v1/responses`."""


def refused(reason: str | None, *names: str, **neutral: object) -> dict[str, Unsupported]:
    """Fields that are refused for the same reason, some with the value that asks for nothing, or a tuple of those."""
    known = {name: value if isinstance(value, tuple) else (value,) for name, value in neutral.items()}
    return {name: Unsupported(known.get(name, ()), reason) for name in (*names, *neutral)}


def ignored(*names: str, **neutral: object) -> dict[str, Unsupported]:
    """Fields that change nothing, some with the value that asks for nothing, or a tuple of those."""
    return refused(None, *names, **neutral)


def _only_scores(moderation: object) -> bool:
    """Whether a policy of moderation blocks nothing."""
    policy = moderation.get("policy") if isinstance(moderation, dict) else moderation
    modes = policy.values() if isinstance(policy, dict) else () if policy is None else (policy,)
    return all(mode is None or (isinstance(mode, dict) and mode.get("mode") == "score") for mode in modes)


_MODERATION = {"moderation": Unsupported((), "the server moderates nothing, and would block nothing", _only_scores)}
_ITEM = ignored("created_by", "name", caller={"type": "direct"}, **{"async": False})
_PART = ignored("prompt_cache_breakpoint", annotations=[], logprobs=[])
_TOOL = ignored("output_schema", allowed_callers=["direct"], defer_loading=False, **{"async": False})

UNSUPPORTED: dict[str, dict[str, Unsupported]] = {
    "": {
        **refused(
            OWN_TEMPLATE, "chat_template", add_generation_prompt=True, continue_final_message=False, documents=[]
        ),
        **refused("use logit_bias", "allowed_token_ids", bad_words=[]),
        **refused(TEXT_ONLY, "audio", modalities=["text"]),
        **refused("every generated choice is returned; use n", best_of=1),
        **refused("only /v1/completions repeats the prompt", echo=False),
        **refused(DEPRECATED, function_call=("none", "auto"), functions=[]),
        **refused(NO_FORM, "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema", grammar=""),
        **refused(NO_FORM, response_format={"type": "text"}),
        **refused("the text ends before the stop string", include_stop_str_in_output=False),
        **refused("a prompt is a text or token ids", "prompt_embeds"),
        **refused("use echo and logprobs of /v1/completions", "prompt_logprobs"),
        **refused("the text has no special tokens; use return_token_ids", skip_special_tokens=True),
        **refused("text cannot be generated in front of other text", suffix=""),
        **refused("the server never shortens a prompt", "truncate_prompt_tokens"),
        **refused("tokens are sampled one by one", use_beam_search=False),
        **refused("the server cannot search the web", "web_search_options"),
        **_MODERATION,
        **ignored("cache_salt", "prediction", "prompt_cache_key", "prompt_cache_retention", "request_id"),
        **ignored("safety_identifier", prompt_cache_options={}),
        **ignored(cache_prompt=True, chat_template_kwargs={}, id_slot=-1, metadata={}, priority=0, store=False),
        **ignored(reasoning_effort="none", service_tier=("auto", "default"), timings_per_token=False),
        **ignored(verbosity="medium"),
    },
    "stream_options": ignored("continuous_usage_stats", include_obfuscation=False),
    "messages": {
        **refused(TEXT_ONLY, "audio"),
        **refused(DEPRECATED, "function_call"),
        **ignored("name", annotations=[], reasoning="", reasoning_content=""),
    },
    "messages.content": ignored("cache_control"),
    "messages.tool_calls": ignored("index"),
    ANTHROPIC: {
        **ignored("cache_control", "container", "inference_geo", context_management={}, diagnostics={}),
        **ignored(mcp_servers=[], speed="standard"),
        **ignored(service_tier=("auto", "standard_only"), thinking={"type": "disabled"}),
    },
    f"{ANTHROPIC}.output_config": ignored("effort"),
    f"{ANTHROPIC}.system": ignored("cache_control", citations=[]),
    f"{ANTHROPIC}.tools": {
        **ignored("cache_control", allowed_callers=["direct"], defer_loading=False),
        **ignored(eager_input_streaming=(False, True), input_examples=[]),
    },
    f"{ANTHROPIC}.messages.content": {
        **ignored("cache_control", "data", "thinking", caller={"type": "direct"}, citations=[], signature=""),
    },
    f"{ANTHROPIC}.messages.content.content": ignored("cache_control"),
    RESPONSES: {
        **_MODERATION,
        **refused("the server keeps no prompt templates", "prompt"),
        **refused("a connection runs one response at a time", "stream_id"),
        **ignored("image", "access_programs", "client_metadata", "max_tool_calls", "prompt_cache_key"),
        **ignored("prompt_cache_retention", "safety_identifier", context_management=[], prompt_cache_options={}),
        **ignored(background_options={"completion_window": "soonest"}, reasoning={}, service_tier=("auto", "default")),
    },
    f"{RESPONSES}.reasoning": ignored(context="auto", mode="standard"),
    f"{RESPONSES}.stream_options": ignored(include_obfuscation=False),
    f"{RESPONSES}.text": ignored(verbosity="medium"),
    f"{RESPONSES}.tools": _TOOL,
    f"{RESPONSES}.tools.tools": _TOOL,
    f"{RESPONSES}.input": _ITEM,
    f"{RESPONSES}.input.content": _PART,
    f"{RESPONSES}.items": _ITEM,
    f"{RESPONSES}.items.content": _PART,
}
"""By the path of the object that has them, without the indices of lists. `""` is the body itself.

A body that declares a field of one of these names supports it: then the entry says nothing about that body.
"""


def asks_for(place: str, name: str, value: object) -> bool:
    """Whether the field `name` of an object at `place`, which no body declares, asks for something."""
    field = UNSUPPORTED.get(place, {}).get(name)
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

    def read(self, body: OpenBody, honoured: Container[str] = frozenset()) -> None:
        """Take the fields of `body` that have no effect. Those `honoured` have one, by their paths without indices.

        Raises `FieldOutOfRange` for one that is known and cannot be honoured.
        """
        for place, path, each in _objects(body, body.place, ""):
            extras = each.model_extra or {}
            _refuse_unsupported(place, path, extras)
            if not each.reads_extras:
                asked = (name for name in extras if f"{place}.{name}" not in honoured)
                self.add(path + name for name in asked if asks_for(place, name, extras[name]))
            self.add(path + name for name in each.without_effect())

    def add(self, paths: Iterable[str]) -> None:
        """Take fields by their dotted paths, no more of them than are named. Raises `FieldOutOfRange` if strict."""
        for path in paths:
            if self._strict:
                raise FieldOutOfRange.at(path, "unknown or without effect, and the server is strict")
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
    for name, field in UNSUPPORTED.get(place, {}).items():
        if name in extras and field.refuses(extras[name]):
            raise FieldOutOfRange.at(f"{path}{name}", f"{field.reason}")


class CallBody(SamplingFields, OpenBody):
    """Base of the bodies of the generating routes. The rest of the server reads them by these names alone."""

    prompt_field: ClassVar[str] = "messages"
    form_field: ClassVar[str] = ""
    """The field that asks for a form of the answer beside `structured_outputs`, if there is one."""
    has_chat: ClassVar[bool] = True
    """Whether its prompt is a chat, whose answer has thoughts and calls."""

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate."""
        return self.max_tokens

    @property
    def limit_field(self) -> str:
        """The field that `token_limit` came in."""
        return "max_tokens"

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report per token; None to report nothing."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the answer tells of the prompt's tokens too."""
        return False

    def own_form(self) -> Grammar | None:
        """What `form_field` says."""
        return None

    def to_grammar(self) -> Grammar | None:
        """What the answer must match. Raises `FieldOutOfRange` if two fields say it."""
        asked = self.own_form()
        if asked is not None and self.structured_outputs is not None:
            both = f"give only one of {self.form_field} and structured_outputs"
            raise FieldOutOfRange(both, param=self.form_field)
        return asked or super().to_grammar()

    def to_tool_use(self) -> ToolUse:
        """What the turn may do with its tools. Raises `FieldOutOfRange` if their fields do not fit together."""
        return ToolUse()

    def without_effect(self) -> list[str]:
        """The declared fields that change nothing beside the others of this body."""
        form, use = self.to_grammar(), self.to_tool_use()
        return form_without_effect(form, use) + loosened(form, use, self.schema_places())

    def schema_places(self) -> dict[str, str]:
        """The field of the schema of each tool, by the tool's name."""
        return {}
