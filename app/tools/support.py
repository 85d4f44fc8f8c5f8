"""How one model talks: what its chats need so that it can think and call tools."""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from app.domain.errors import FieldOutOfRange, MalformedRequest
from app.domain.values import Grammar, GrammarKind
from app.text.tokenizer import Tokens
from app.tools.calls import CallReader
from app.tools.definitions import (
    PREFIX_END,
    Message,
    Tool,
    ToolMode,
    ToolUse,
    messages_as_text,
    messages_for_template,
    with_instructions,
)
from app.tools.formats import HARMONY, HARMONY_THINKING, Thinking, find_chat_format
from app.tools.grammar import (
    after_thinking,
    any_answer,
    call_grammar,
    foreign_keywords,
    held_schema,
    plain_grammar,
    with_spaces,
)
from app.tools.lark import PREFIX, START
from app.tools.reader import Answer, AnswerReader, FamilyReader
from app.tools.thinking import (
    EFFORT,
    HARMONY_EFFORTS,
    SWITCHES,
    HarmonyReader,
    Heeded,
    Opening,
    Seal,
    ThoughtReader,
    Wish,
)

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


_PROBE_THOUGHT = "thought_of_probe"
MOST_ENDS = 4
"""The most ends of shared prefixes of one prompt; later ones are left out."""
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")
"""Fields of a `response_template` that hold thoughts."""


class ToolSupport:
    """Renders chats with tools, and reads their answers. Any thread may use it."""

    def __init__(
        self,
        tokens: Tokens,
        chat_format: str | None = None,
        secret: bytes | None = None,
        *,
        keeps_states: bool = False,
    ) -> None:
        """`chat_format` names how the model talks; None: its chat template shows it. Servers with one `secret` take
        each other's thoughts back. A model with recurrent layers `keeps_states`. Raises `FieldOutOfRange` for an
        unknown name.
        """
        self._tokens = tokens
        self.keeps_states = keeps_states
        self.seal = Seal(secret)
        try:
            self._form, self.thinking = find_chat_format(tokens.chat_template, chat_format)
            """How the model thinks; None: it does not."""
        except ValueError as error:
            raise FieldOutOfRange.at("chat_format", str(error)) from None
        names = [self._form.name] if self.thinking is None else [self._form.name, self.thinking.name]
        self.format_name = "+".join(dict.fromkeys(names))
        """Such as `hermes`, `hermes+think`, `harmony`."""
        self._template: ResponseTemplate | None = None
        if (declared := tokens.response_template) is not None and chat_format is None:
            from transformers.utils.chat_parsing.response_templates import load_response_template

            self._template = load_response_template(declared)
            self.thinking = _declared_thinking(self._template)
            self.format_name = "response_template"

    def heed(self, wish: Wish) -> Heeded:
        """What this model can do of what a call says of thinking."""
        reads, form = self._tokens.template_reads, self.thinking
        variables = {name: value for name, value in wish.variables.items() if name in reads}
        unread = [f"chat_template_kwargs.{name}" for name in wish.variables if name not in reads]
        ignored = ["chat_template_kwargs"] if unread and not variables else unread
        switches = [name for name in SWITCHES if name in reads]
        thinks, effort = wish.thinks, wish.effort
        if effort is not None:
            if EFFORT in reads:
                variables.setdefault(
                    EFFORT, HARMONY_EFFORTS.get(effort, effort) if form is HARMONY_THINKING else effort
                )
            elif not switches and not (effort == "none" and form is None):
                ignored.append(wish.effort_field)
            thinks = effort != "none" if thinks is None else thinks
        if thinks is not None:
            variables = dict.fromkeys(switches, thinks) | variables
        if wish.thinks is not None and not switches and wish.thinks is (form is None):
            ignored.append("thinking")
        budget = wish.budget if self.has_budget else None
        if wish.budget is not None and budget is None and not (wish.thinks and form is None):
            ignored.append(wish.budget_field)
        return Heeded(variables, budget, tuple(ignored))

    @property
    def has_budget(self) -> bool:
        """Whether a count of tokens can end the model's thoughts."""
        return self._end_of_thoughts is not None

    @cached_property
    def _end_of_thoughts(self) -> int | None:
        """The token that ends thoughts; None: several do together, as text."""
        form = self.thinking
        markers = [] if form is None else [marker for marker in form.markers if form.end.startswith(marker)]
        return next((found for found in map(self._tokens.added_id, markers) if found is not None), None)

    @cached_property
    def reads_thoughts(self) -> bool:
        """Whether the chat template writes what the model thought before a call."""
        thought = {**_PROBE_CHAT[1], "reasoning_content": _PROBE_THOUGHT}
        return _PROBE_THOUGHT in self._probe([_PROBE_CHAT[0], thought, _PROBE_CHAT[2]])

    def opening(self, prompt: str) -> Opening:
        """How a prompt leaves the model's turn, as the end of its text says."""
        form, end = self.thinking, prompt[-200:].rstrip()
        if form is None or (end.endswith(form.end) and form is not HARMONY_THINKING):  # whose next message begins so
            return Opening.CLOSED
        return Opening.OPEN if end.endswith(form.open.rstrip()) else Opening.FREE

    def prefix_ends(self, text: str, token_ids: Sequence[int], render_marked: Callable[[], str]) -> tuple[int, ...]:
        """Where the prefixes of a prompt end that other chats may share: the number of its tokens before each mark,
        rising. For a model with recurrent layers a state is kept there, because KV alone is not enough to go on from a
        prefix. `text` is that of the prompt, and `render_marked` returns that of the same chat with a `PREFIX_END`
        after its instructions and tools, and after each text that the client has marked.

        Empty for a model without recurrent layers, and if the template refuses the marked chat or renders the rest of
        it differently.
        """
        if not self.keeps_states:
            return ()
        try:
            parts = render_marked().split(PREFIX_END)
        except MalformedRequest:
            return ()
        places = [*accumulate(len(part.encode()) for part in parts[: min(MOST_ENDS, len(parts) - 1)])]
        if not places or "".join(parts) != text:
            return ()
        lengths = (len(self._tokens.token_bytes(token_id)) for token_id in token_ids)
        ends = [*takewhile(lambda end: end <= places[-1], accumulate(lengths))]
        return tuple(sorted({bisect_right(ends, place) for place in places}))

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end a turn, whatever the checkpoint says."""
        found = map(self._tokens.added_id, ("<|call|>", "<|return|>") if self._form is HARMONY else ())
        return frozenset(each for each in found if each is not None)

    @cached_property
    def ends_of_messages(self) -> frozenset[int]:
        """The special token by which the chat template ends a message of the model, if it does."""
        said = {"role": "assistant", "content": _PROBE_THOUGHT}
        text = self._probe([_PROBE_CHAT[0], said], add_generation_prompt=False)
        _, _, after = text.partition(_PROBE_THOUGHT)
        return frozenset(self._tokens.encode(after, add_special_tokens=False)[:1]) & self._tokens.special_ids

    def check_format(self) -> None:
        """Warn of a chat template that writes calls in a form in which no answer is read."""
        if self._template is not None or self._form is HARMONY or not self._form.marker or not self.writes_calls:
            return
        kind = CallReader if self._form.begin else FamilyReader
        reader = kind(self._form, [Tool("call_of_probe")])
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

    def _are_tokens(self, markers: frozenset[str]) -> bool:
        return all(self._tokens.added_id(marker) is not None for marker in markers)

    def shown(self, use: ToolUse) -> frozenset[int]:
        """The special tokens that an answer is read by."""
        if self._template is not None and use.callable:  # which of them it looks for, only its patterns know
            return self._tokens.special_ids - self._tokens.eos_token_ids
        thoughts = frozenset[str]() if self.thinking is None else self.thinking.markers
        markers = map(self._tokens.added_id, thoughts | (self._form.markers if use.callable else frozenset()))
        return frozenset(marker for marker in markers if marker is not None) & self._tokens.special_ids

    def chat_text(self, messages: Sequence[Message], tools: Sequence[Tool], **options: Any) -> str:
        """Text of a chat; the other arguments and errors of `Tokens.chat_text`."""
        written = messages_for_template(messages) if self.writes_calls else messages_as_text(messages, self._form)
        if self._form is HARMONY:
            written = [_without_thoughts(each) for each in written]
        if tools and not self.writes_tools:
            return self._tokens.chat_text(with_instructions(written, tools, self._form), **options)
        return self._tokens.chat_text(written, tools=[tool.for_template() for tool in tools], **options)

    def grammar(self, use: ToolUse, places: Mapping[str, str], content: Grammar | None = None) -> Grammar | None:
        """What holds a turn to the calls that it may make; None where the model alone decides.

        `places` has the field of each tool's schema, by the tool's name. `content` is the form of an answer without
        calls, a JSON schema; None: any text.
        """
        if not use.is_held and content is None:
            return None
        schema = None if content is None else _schema_of(content)
        said = "" if self.thinking is None else self.thinking.answer
        text = call_grammar(use, self._form, self._tokens.added_id, content_schema=schema, answer=said)
        tools = [tool for tool in use.callable if use.holds(tool, has_form=content is not None)]
        fields = [places.get(tool.name, "tools") for tool in tools]
        named = [f"the parameters of {tool.name!r}" for tool in tools]
        parts = tuple(zip(named, map(_part_of, tools, fields), strict=True))
        answer = () if content is None else (("the form", _part(schema or {}, content.field)),)
        return Grammar(GrammarKind.LARK, text, "tools", parts + answer)

    def after_thinking(self, grammar: Grammar | None, opening: Opening, budget: int | None) -> Grammar | None:
        """What holds a turn to a grammar once the model has thought; `budget` is how many tokens it may think."""
        form = self.thinking
        if form is None or opening is Opening.CLOSED or (grammar is None and budget is None):
            return grammar
        token_id = self._tokens.added_id
        if grammar is None:
            text = after_thinking(
                any_answer(self._form, token_id), form, opening, token_id, budget=budget, is_answer=False
            )
            return Grammar(GrammarKind.LARK, text, "thinking_budget")
        is_calls = grammar.field == "tools"
        try:
            held = grammar.text if is_calls else plain_grammar(grammar)
        except (ValueError, TypeError):  # which its compilation tells
            return grammar
        text = after_thinking(held, form, opening, token_id, budget=budget, is_answer=not is_calls)
        parts = grammar.parts or (("the form", grammar),)
        return Grammar(GrammarKind.LARK, text, grammar.field, parts)

    def answer(
        self, use: ToolUse, *, has_form: bool, opening: Opening = Opening.CLOSED, streams: bool = True
    ) -> Answer:
        """An answer before its first token.

        `has_form`: if it does not begin with a call, it is of another form, and has none. `opening` is how the prompt
        leaves the turn. `streams`: a client reads it as it comes.
        """
        only_calls, is_held = use.mode is ToolMode.REQUIRED, use.is_held or has_form
        shown = self.shown(use) if self.thinking is not None else frozenset[int]()

        def token_bytes(token_id: int) -> int:
            is_text = token_id in shown or token_id not in self._tokens.special_ids
            return len(self._tokens.token_bytes(token_id)) if is_text else 0

        if self._form is HARMONY and self._template is None:
            are_tokens = self._are_tokens(self._form.markers)
            harmony = HarmonyReader(use.callable, only_calls=only_calls, whole_markers=are_tokens)
            return Answer(harmony, token_bytes, self._end_of_thoughts)
        calls: AnswerReader | None = None
        if use.callable and self._template is not None:
            from app.tools.template_reader import TemplateReader

            calls = TemplateReader(self._form, self._template, use.callable)
        elif use.callable:
            kind = CallReader if self._form.begin else FamilyReader
            calls = kind(
                self._form,
                use.callable,
                only_at_start=has_form,
                only_calls=only_calls,
                is_held=is_held,
                whole_markers=self._are_tokens(self._form.begins),
                at_once=not streams,
            )
        if self.thinking is None:
            return Answer(calls)
        of_thoughts = self._are_tokens(self.thinking.markers)
        reader = ThoughtReader(self.thinking, calls, opening, whole_markers=of_thoughts)
        return Answer(reader, token_bytes, self._end_of_thoughts)


def _without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the template of gpt-oss takes it: not with calls, content and thoughts."""
    if not (message.get("tool_calls") and message.get("content")):
        return message
    return {name: value for name, value in message.items() if name not in _THOUGHTS}


def _declared_thinking(template: ResponseTemplate) -> Thinking | None:
    """How a checkpoint says itself that it thinks, where it says so by texts."""
    for name, field in template.fields.items():
        if name in _THOUGHTS and field.open_literals and field.close_literals:
            return Thinking("response_template", field.open_literals[0], field.close_literals[0])
    return None


def turn_grammar(
    form: Grammar | None,
    use: ToolUse,
    support: ToolSupport,
    opening: Opening = Opening.CLOSED,
    budget: int | None = None,
    places: Mapping[str, str] = MappingProxyType({}),
) -> Grammar | None:
    """What holds a turn: the `form` of its answer, the calls that it may make, or either of them, after its thoughts. A
    form has no effect where calls are required. `opening` is how the prompt leaves the turn, and `budget` how many
    tokens the model may think. `places` has the field of each tool's schema, by the tool's name, for errors.

    Raises `FieldOutOfRange` for a form that cannot stand beside calls.
    """
    if form is None or not use.callable:
        return support.after_thinking(form or support.grammar(use, places), opening, budget)
    if form.kind is not GrammarKind.JSON_SCHEMA:
        raise FieldOutOfRange.at(form.field, "only a JSON schema is possible with tools")
    _schema_of(form)
    held = support.grammar(use, places, None if use.mode is ToolMode.REQUIRED else form)
    return support.after_thinking(held, opening, budget)


def form_without_effect(form: Grammar | None, use: ToolUse) -> list[str]:
    """The field of a form that no answer will have, as each must be calls."""
    if form is None or use.mode is not ToolMode.REQUIRED:
        return []
    return [form.field.removesuffix(".schema").removesuffix(".json_schema")]


def loosened(form: Grammar | None, use: ToolUse, places: Mapping[str, str]) -> list[str]:
    """The keywords of schemas that calls would have to follow, and need not. `places` has the field of each schema, by
    the name of its tool.
    """
    if form is None and not use.holds_arguments:
        return []
    return [f"{places[tool.name]}.{path}" for tool in use.callable for path in foreign_keywords(tool)]


def _part_of(tool: Tool, field: str) -> Grammar:
    if tool.lark is None:
        return _part(held_schema(tool), field)
    text = f"start: {START}\n{tool.lark}".replace(PREFIX, "TEXT_")
    return Grammar(GrammarKind.LARK, text, field)


def _part(schema: dict[str, Any], field: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, with_spaces(schema), field)


def _schema_of(content: Grammar) -> dict[str, Any]:
    try:
        schema = json.loads(content.text)
    except ValueError as error:
        raise FieldOutOfRange.at(content.field, str(error)) from None
    if not isinstance(schema, dict):
        raise FieldOutOfRange.at(content.field, "a JSON schema with tools must be an object")
    return schema
