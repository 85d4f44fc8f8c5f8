"""Answers of gpt-oss: messages, each with a channel.

The format: https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from app.tools.definitions import Tool
from app.tools.formats import HARMONY
from app.tools.reader import (
    CallArguments,
    CallBegun,
    Content,
    Piece,
    Reasoning,
    TextReader,
    new_call_id,
    read_calls,
    undecided,
)

MESSAGE = "<|message|>"
BEGINS = ("<|start|>", "<|channel|>")
"""What begins a message."""
ENDS = ("<|end|>", "<|call|>", "<|return|>", *BEGINS)
"""What ends one: the next may begin where a model forgets the end."""
MAX_HEADER = 300
_HEADER = re.compile(r"(<\|start\|>|assistant|<\|channel\|>|<\|constrain\|>|[\w.=\-]|\s)*")
_WORDS = ("<|start|>", "<|channel|>", "<|constrain|>", MESSAGE)


class HarmonyReader(TextReader):
    """A `ThinkingReader`: `analysis` is thoughts, a message to `functions.NAME` a call, and anything else content."""

    def __init__(self, tools: Sequence[Tool], *, only_calls: bool = False, whole_markers: bool = False) -> None:
        """`tools` may be called; a call of any other is content. `only_calls`: a grammar allows no content.
        `whole_markers`: the model writes each marker as one token.
        """
        super().__init__(HARMONY, tools, only_calls=only_calls, whole_markers=whole_markers)
        self._taken = 0
        """Bytes of UTF-8 that have been."""
        self._end = 0
        """Those up to the end of the thoughts."""
        self._kind: type[Reasoning | Content | CallBegun] | None = None
        """What the message is; None: its header has not ended."""
        self._name = ""
        self._held: list[str] = []
        """The arguments of the call that has not ended."""
        self._said: set[type] = set()
        self._space = ""
        self._is_cut = False
        self.content_start: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.calls > 0 and not self._is_cut

    @property
    def is_thinking(self) -> bool:
        return self._kind in (None, Reasoning) and not self._said - {Reasoning} and not self.calls

    @property
    def thought_bytes(self) -> int | None:
        return None if self._kind is Reasoning else self._end

    def _finish(self, cut: bool) -> Iterator[Piece]:
        yield from self._read(last=not cut or self._whole_markers)
        if self._kind is CallBegun and cut:
            self._is_cut = True
        elif self._kind is CallBegun:
            yield from self._end_message()
        elif self._kind is None and not cut and not self._text.startswith(_WORDS):
            yield from self._say(Content, self._take(len(self._text)))
        if self._kind is Reasoning:
            self._end = self._taken

    def _read(self, *, last: bool) -> Iterator[Piece]:
        while self._text:
            if self._kind is None:
                place = self._text.find(MESSAGE)
                header = self._text if place < 0 else self._text[:place]
                if not self._may_be_header(header):
                    self._take(next((len(each) for each in ENDS if self._text.startswith(each)), 0))
                    self._kind = Content
                elif place < 0:
                    return
                else:
                    self._begin_message(self._take(place))
                    self._take(len(MESSAGE))
                continue
            found = [(self._text.find(marker), marker) for marker in ENDS if marker in self._text]
            if not found:
                waits = 0 if last else max(undecided(self._text, marker) for marker in ENDS)
                yield from self._body(self._take(len(self._text) - waits))
                return
            place, marker = min(found)
            yield from self._body(self._take(place))
            if marker not in BEGINS:
                self._take(len(marker))
            yield from self._end_message()

    def _may_be_header(self, text: str) -> bool:
        taken = _HEADER.match(text)
        rest = text[taken.end() :] if taken else text
        begins = not text.strip() or text.lstrip().startswith(("<|", "assistant", "to="))
        begins = begins or any(word.startswith(text.strip()) for word in ("<|", "assistant", "to="))
        return begins and len(text) <= MAX_HEADER and (not rest or any(word.startswith(rest) for word in _WORDS))

    def _begin_message(self, header: str) -> None:
        to = re.search(r"to=functions\.([\w.\-]+)", header)
        if to is not None and to[1] in self._tools:
            self._kind, self._name, self._held = CallBegun, to[1], []
        elif re.search(r"<\|channel\|>\s*analysis", header):
            self._kind = Reasoning
        else:
            self._kind = Content
        if self._kind in self._said:
            self._space = "\n"

    def _body(self, text: str) -> Iterator[Piece]:
        if self._kind is CallBegun:
            self._held.append(text)
        elif self._kind is Reasoning:
            yield from self._say(Reasoning, text)
        else:
            yield from self._say(Content, text)

    def _say(self, kind: type[Reasoning | Content], text: str) -> Iterator[Piece]:
        if text:
            if kind is Content and self.content_start is None:
                self.content_start = self._taken - len(text.encode(errors="surrogatepass"))
            self._said.add(kind)
            text, self._space = self._space + text, ""
            yield kind(text)

    def _end_message(self) -> Iterator[Piece]:
        if self._kind is Reasoning:
            self._end = self._taken
        if self._kind is CallBegun:
            text = "".join(self._held)
            calls = read_calls({"name": self._name, "arguments": text}, self._tools)
            if calls is None:
                yield from self._say(Content, text)
            for name, arguments in calls or ():
                self.calls += 1
                yield CallBegun(self.calls - 1, new_call_id(HARMONY), name)
                yield CallArguments(self.calls - 1, arguments)
        self._kind = None

    def _take(self, length: int) -> str:
        taken = super()._take(length)
        self._taken += len(taken.encode(errors="surrogatepass"))
        return taken
