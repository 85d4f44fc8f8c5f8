"""What a model has written, found again in a chat that its client sends back.

A client has the model's answers as messages, and the chat template writes them anew: in other tokens, with other spaces
in a call, without thoughts. The session has the tokens that the model wrote. Where both say the same, the prompt goes
on from these, and their KV is there.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeAlias

from app.domain.values import FinishReason, Ticket, TurnUsage, common_prefix
from app.messages import TurnFinished
from app.text.chat_template import REASONING
from app.text.generation import TextChunk
from app.text.tokenizer import Tokens
from app.tools.definitions import Tool, ToolMode, ToolUse, calls_of
from app.tools.reader import CallArguments, CallBegun, Content, Reasoning, load_json
from app.tools.support import ToolSupport
from app.tools.thinking import Opening

Chat = list[dict[str, Any]]
Past: TypeAlias = "tuple[array[int], Sequence[int]]"
"""A session's history, and where the model's answers in it begin."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The tokens of a chat."""

    chat: Chat
    """Its messages, as chat templates read them."""
    tools: Sequence[Tool]
    encode: Callable[[Chat], list[int]]
    """Gives the tokens of another chat with these tools."""
    token_ids: list[int]
    opening: Opening
    """How it leaves the model's turn."""
    left_out: Iterator[str] = field(default_factory=lambda: iter(()))
    """The paths of the fields that make no difference to the tokens."""
    prefix_ends: tuple[int, ...] = ()
    """Lengths, in tokens, of the prefixes that other chats may share."""
    recomputed_because: str | None = None
    """Where it first differs from the history that it continues; None: nowhere, or it continues none."""


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer says. `calls` are names with arguments: JSON values, or the text of what is none."""

    thought: str
    content: str
    calls: tuple[tuple[str, Any], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The tools that it calls."""
        return tuple(name for name, _ in self.calls)


def go_on(
    prompt: ChatPrompt, pasts: Sequence[Past], tokens: Tokens, support: ToolSupport, *, named: bool
) -> ChatPrompt:
    """The prompt in the tokens of the history that it shares most with. Of equals, a history that it keeps whole wins.

    Each answer of the model there keeps its tokens if the chat has a message in its place that means the same: equal
    text but for white space around it, and calls with equal arguments, but for keys that are null or have the default
    of the tool's schema.

    Thoughts that the chat lacks come back where the chat template writes them. Unless the history is that of a session
    that the call has `named`, it may be of another conversation: what differs is told only if the chat has the first
    answer, or an answer in its place that is much like it.
    """
    found, most = prompt, (-1, False, 0)
    for past in pasts:
        kept, continued = _Continuation(prompt, past, tokens, support).prompt(named=named)
        rank = kept, kept >= len(past[0]) - 1, common_prefix(past[0], array("I", continued.token_ids))
        if rank > most:
            found, most = continued, rank
    return found


WITHOUT_THOUGHTS = "without its thinking"
_END = TurnFinished(Ticket(0), FinishReason.STOP, TurnUsage(), 0)


class _Spelled:
    """Tokens, and the text that they stand for in UTF-8, special ones included."""

    def __init__(self, ids: Sequence[int], tokens: Tokens, ends: frozenset[int]) -> None:
        self.ids = ids
        self._tokens = tokens
        pieces = [tokens.token_bytes(each) for each in ids]
        self.text = b"".join(pieces)
        self.places = list(accumulate(map(len, pieces), initial=0))
        """Where each token begins in the text, and its end."""
        self._ends = [index for index, each in enumerate(ids) if each in ends]

    def told(self, place: int, end: int, shown: frozenset[int]) -> str:
        """The text from that place up to the token `end`, of special tokens only with those that are `shown`."""
        first = bisect_left(self.places, place)
        told = (
            self._tokens.token_bytes(each) if each in shown else self._tokens.text_bytes(each)
            for each in self.ids[first:end]
        )
        return b"".join([self.text[place : self.places[first]], *told]).decode(errors="replace")

    def end(self, index: int) -> int | None:
        """The first token from there on that ends a turn."""
        number = bisect_left(self._ends, index)
        return self._ends[number] if number < len(self._ends) else None


class _Continuation:
    """One chat after one history."""

    def __init__(self, prompt: ChatPrompt, past: Past, tokens: Tokens, support: ToolSupport) -> None:
        self._prompt, self._tokens, self._support = prompt, tokens, support
        self._ends = tokens.eos_token_ids | support.ends | support.ends_of_messages
        called = (call["function"]["name"] for message in prompt.chat for call in calls_of(message))
        self._tools = {name: Tool(name) for name in called} | {tool.name: tool for tool in prompt.tools}
        self._use = ToolUse(tuple(self._tools.values()), ToolMode.AUTO, frozenset(self._tools))
        self._shown = support.shown(self._use)
        history, self._starts = past
        self._past = _Spelled(history, tokens, self._ends)
        self._known: dict[int, Said] = {}

    def prompt(self, *, named: bool) -> tuple[int, ChatPrompt]:
        """How many tokens of the history are kept up to the end of an answer, and the prompt in these."""
        chat = self._with_thoughts() if self._support.thinking and self._support.reads_thoughts else None
        token_ids = self._prompt.token_ids if chat is None else self._prompt.encode(chat)
        new, past = _Spelled(token_ids, self._tokens, self._ends), self._past
        kept = taken = place = 0
        because, is_known = None, named
        answers = sum(message["role"] == "assistant" for message in self._prompt.chat)
        for number, start in enumerate(self._starts, 1):
            between = past.text[past.places[kept] : past.places[start]]
            if start < kept or not new.text.startswith(between, place):
                goes_back = between.startswith(new.text[place:]) or (not named and number > answers)
                if not goes_back:  # to an earlier place, or another conversation began so
                    because, is_alike = self._difference_before(number, start, between, new, place)
                    is_known = is_known or is_alike
                break
            place += len(between)
            end = new.end(bisect_left(new.places, place))
            if end is None:  # the prompt asks for this answer again, or goes on with it
                break
            if new.text[place : new.places[end]] != past.text[past.places[start] : past.places[self._end(start)]]:
                told = self._read(new.told(place, end, self._shown), self._opening(start))
                difference = self._difference(self._answer(start), told)
                if difference is not None:
                    because = f"answer {number}: {difference}"
                    is_known = is_known or _much_alike(self._answer(start), told)
                    break
            kept, taken, place = self._end(start), end, new.places[end]
        because = because if kept or is_known else None
        token_ids = [*past.ids[:kept], *new.ids[taken:]]
        return kept, replace(self._prompt, token_ids=token_ids, recomputed_because=because)

    def _end(self, start: int) -> int:
        end = self._past.end(start)
        return len(self._past.ids) if end is None else end

    def _answer(self, start: int) -> Said:
        """What the answer that begins there says."""
        if start not in self._known:
            written = self._past.told(self._past.places[start], self._end(start), self._shown)
            self._known[start] = self._read(written, self._opening(start))
        return self._known[start]

    def _opening(self, start: int) -> Opening:
        place = self._past.places[start]
        return self._support.opening(self._past.text[max(0, place - 800) : place].decode(errors="replace"))

    def _read(self, written: str, opening: Opening) -> Said:
        answer = self._support.answer(self._use, has_form=False, opening=opening)
        thought = content = ""
        calls: list[tuple[str, str]] = []
        for piece in (*answer.pieces(TextChunk(written)), *answer.pieces(_END)):
            match piece:
                case Reasoning():
                    thought += piece.text
                case Content():
                    content += piece.text
                case CallBegun():
                    calls.append((piece.name, ""))
                case CallArguments():
                    name, arguments = calls[-1]
                    calls[-1] = name, arguments + piece.text
        return _said(thought, content, calls)

    def _with_thoughts(self) -> Chat | None:
        """The chat with the thoughts of answers that it has without them; None: there are none."""
        answers = defaultdict[tuple[str, tuple[str, ...]], list[tuple[int, Said]]](list)
        for start in self._starts:
            known = self._answer(start)
            answers[known.content, known.names].append((start, known))
        chat, last, has_some = list(self._prompt.chat), -1, False
        for index, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            functions = [call["function"] for call in calls_of(message)]
            calls = [(each["name"], each["arguments"] or "{}") for each in functions]
            told = _said("", message.get("content") or "", calls)
            for start, known in answers.get((told.content, told.names), ()):
                if start > last and self._difference(replace(known, thought=""), told) is None:
                    last = start
                    if known.thought and not any(message.get(name) for name in REASONING):
                        chat[index], has_some = {**message, "reasoning_content": known.thought}, True
                    break
        return chat if has_some else None

    def _difference(self, known: Said, told: Said) -> str | None:
        """What of an answer that was written again is not as the model wrote it."""
        if known.content != told.content:
            return "other text"
        if known.names != told.names:
            return "other calls"
        for (name, one), (_, other) in zip(known.calls, told.calls, strict=True):
            try:
                if not _alike(one, other, self._tools[name].schema):
                    return f"other arguments of {name}"
            except RecursionError:
                return f"other arguments of {name}"
        if known.thought != told.thought:
            return "other thinking" if told.thought else WITHOUT_THOUGHTS
        return None

    def _difference_before(
        self, number: int, start: int, between: bytes, new: _Spelled, place: int
    ) -> tuple[str, bool]:
        """What differs in front of an answer, and whether the answer there is much like it.

        A prompt that opens thoughts lacks them where they are left out.
        """
        form = self._support.thinking
        opened = -1 if form is None else between.rfind(form.open.encode())
        if opened < 0 or not new.text.startswith(between[:opened], place):
            return f"before answer {number}", False
        place += opened
        end = new.end(bisect_left(new.places, place))
        told = self._read(new.told(place, len(new.ids) if end is None else end, self._shown), Opening.FREE)
        known = replace(self._answer(start), thought=told.thought)
        difference = self._difference(known, told) or WITHOUT_THOUGHTS
        return f"answer {number}: {difference}", _much_alike(known, told)


def _said(thought: str, content: str, calls: Sequence[tuple[str, str]]) -> Said:
    values = [(name, load_json(arguments)) for name, arguments in calls]
    kept = [(name, text if value is None else value) for (name, value), (_, text) in zip(values, calls, strict=True)]
    return Said(thought.strip(), content.strip(), tuple(kept))


def _much_alike(known: Said, told: Said) -> bool:
    """Whether an answer is the model's with changes: it calls the same tools, and has the first half of the text."""
    return known.names == told.names and told.content.startswith(known.content[: (len(known.content) + 1) // 2])


def _alike(one: Any, other: Any, schema: object) -> bool:
    """Whether two JSON values are equal, but for keys of objects that are null or have the schema's default."""
    known: Mapping[str, Any] = schema if isinstance(schema, dict) else {}
    if isinstance(one, dict) and isinstance(other, dict):
        found = known.get("properties")
        inner = found if isinstance(found, dict) else {}
        both = one.keys() & other.keys()
        extra = [(inner.get(key), (one | other)[key]) for key in one.keys() ^ other.keys()]
        return all(_alike(one[key], other[key], inner.get(key)) for key in both) and all(
            value is None or (isinstance(each, dict) and "default" in each and _alike(each["default"], value, None))
            for each, value in extra
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other, [known.get("items")] * len(one)))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
