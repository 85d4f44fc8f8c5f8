"""What one model needs so that its chats can have tools."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from app.domain.errors import FieldOutOfRange, MalformedRequest
from app.domain.values import Grammar, GrammarKind
from app.text.tokenizer import Tokens
from app.tools.definitions import Tool, ToolMode, ToolUse, find_format
from app.tools.grammar import call_grammar, known_keywords, with_spaces
from app.tools.lark import PREFIX, START
from app.tools.prompt import Message, messages_as_text, messages_for_template, with_instructions
from app.tools.reader import Answer, FamilyReader

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

logger = logging.getLogger(__name__)

_PROBE = Tool("probe_of_tools", "a probe")
_PROBE_CALL = {"id": "probe0000", "type": "function", "function": {"name": "call_of_probe", "arguments": {}}}
_PROBE_CHAT: tuple[Message, ...] = (
    {"role": "user", "content": "probe"},
    {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "content": "answer_of_probe", "tool_call_id": "probe0000", "name": "call_of_probe"},
)


class ToolSupport:
    """Renders chats with tools, and reads their answers. Any thread may use it."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._form = find_format(tokens.chat_template)
        self._template: ResponseTemplate | None = None
        if (declared := tokens.response_template) is not None:
            from transformers.utils.chat_parsing.response_templates import load_response_template

            self._template = load_response_template(declared)

    def check_format(self) -> None:
        """Warn of a chat template that writes calls in a form in which no answer is read."""
        if self._template is not None or not self._form.marker or not self.writes_calls:
            return
        reader = FamilyReader(self._form, [Tool("call_of_probe")])
        list(reader.push(self._probe(_PROBE_CHAT)))
        if not reader.calls:
            logger.warning(
                "the chat template writes calls of tools in a form that is not read: unless a call is required, "
                "calls stay in the content"
            )

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the model's chat template writes the tools that may be called."""
        return _PROBE.name in self._probe(_PROBE_CHAT[:1], tools=[_PROBE.for_template()])

    @cached_property
    def writes_calls(self) -> bool:
        """Whether the model's chat template writes calls, and what tools answered."""
        text = self._probe(_PROBE_CHAT)
        return "call_of_probe" in text and "answer_of_probe" in text

    def _probe(self, chat: Sequence[Message], **options: Any) -> str:
        try:
            return self._tokens.chat_text(chat, **options)
        except MalformedRequest:
            return ""

    @cached_property
    def shown(self) -> frozenset[int]:
        """The special tokens that an answer with calls is read by."""
        if self._template is not None:  # which of them it looks for, only its patterns know
            return self._tokens.special_ids - self._tokens.eos_token_ids
        written = (self._form.marker, self._form.end_marker, *self._form.inner_markers)
        markers = (self._tokens.special_id(marker) for marker in written)
        return frozenset(marker for marker in markers if marker is not None)

    def chat_text(self, messages: Sequence[Message], tools: Sequence[Tool], **options: Any) -> str:
        """Text of a chat; the other arguments and errors of `Tokens.chat_text`."""
        written = messages_for_template(messages) if self.writes_calls else messages_as_text(messages, self._form)
        if tools and not self.writes_tools:
            return self._tokens.chat_text(with_instructions(written, tools, self._form), **options)
        return self._tokens.chat_text(written, tools=[tool.for_template() for tool in tools], **options)

    def grammar(self, use: ToolUse, content: Grammar | None = None) -> Grammar | None:
        """What holds a turn to the calls that it may make; None where the model alone decides.

        `content` is the form of an answer without calls, a JSON schema; None: any text.
        """
        if not use.is_held and content is None:
            return None
        schema = None if content is None else _schema_of(content)
        text = call_grammar(use, self._form, self._tokens.special_id, content_schema=schema)
        parts = tuple((f"the parameters of {tool.name!r}", _part_of(tool)) for tool in use.callable)
        answer = () if content is None else ((f"the form in {content.field}", _part(schema or {})),)
        return Grammar(GrammarKind.LARK, text, "tools", parts + answer)

    def answer(self, use: ToolUse, *, has_form: bool) -> Answer:
        """An answer before its first token.

        `has_form`: if it does not begin with a call, it is of another form, and has none.
        """
        if not use.callable:
            return Answer()
        if self._template is not None:
            from app.tools.template_reader import TemplateReader

            return Answer(TemplateReader(self._form, self._template, use.callable))
        only_calls, is_held = use.mode is ToolMode.REQUIRED, use.is_held or has_form
        reader = FamilyReader(self._form, use.callable, only_at_start=has_form, only_calls=only_calls, is_held=is_held)
        return Answer(reader)


def turn_grammar(form: Grammar | None, use: ToolUse, support: ToolSupport) -> Grammar | None:
    """What holds a turn: the `form` of its answer, the calls that it may make, or either of them. A form has no effect
    where calls are required.

    Raises `FieldOutOfRange` for a form that cannot stand beside calls.
    """
    if form is None or not use.callable:
        return form or support.grammar(use)
    if form.kind is not GrammarKind.JSON_SCHEMA:
        raise FieldOutOfRange(f"{form.field}: only a JSON schema is possible with tools", param=form.field)
    _schema_of(form)
    return support.grammar(use, None if use.mode is ToolMode.REQUIRED else form)


def form_without_effect(form: Grammar | None, use: ToolUse) -> list[str]:
    """The field of a form that no answer will have, as each must be calls."""
    if form is None or use.mode is not ToolMode.REQUIRED:
        return []
    return [form.field.removesuffix(".schema").removesuffix(".json_schema")]


def _part_of(tool: Tool) -> Grammar:
    if tool.lark is None:
        return _part(known_keywords(tool.schema))
    text = f"start: {START}\n{tool.lark}".replace(PREFIX, "TEXT_")
    return Grammar(GrammarKind.LARK, text, "tools")


def _part(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, with_spaces(schema), "tools")


def _schema_of(content: Grammar) -> dict[str, Any]:
    try:
        schema = json.loads(content.text)
    except ValueError as error:
        raise FieldOutOfRange(f"{content.field}: {error}", param=content.field) from None
    if not isinstance(schema, dict):
        raise FieldOutOfRange(f"{content.field}: a JSON schema with tools must be an object", param=content.field)
    return schema
