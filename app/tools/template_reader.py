"""Answers of a checkpoint that says itself how they are read, by Transformers' parser."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from app.tools.definitions import Tool
from app.tools.formats import ToolFormat
from app.tools.reader import AnswerReader, Content, Piece, Speech, read_calls

CALLS = "tool_calls"
MAX_FED = 4096
"""Characters of plain text that one parser takes: it copies all that it has had for each that comes."""
SHARE = 64
"""While calls or white space go on, the parser gets as much at a time as it holds already, divided by this."""
MAX_CLOSE = 256
"""Characters of what ends calls."""


class TemplateReader(AnswerReader):
    """Reads as a `response_template` says. A call comes once it is complete."""

    def __init__(self, form: ToolFormat, template: ResponseTemplate, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._form = form
        self._template = template
        self._parser: ResponseParser | None = ResponseParser(template, prefix="")
        self._fed = 0
        """Characters that it has had."""
        self._unread: list[str] = []
        """Text of a region of calls that is open, or in the parser's hands."""
        self._held = 0
        """Its characters."""
        self._in_calls = False
        self._speech = Speech()

    def push(self, text: str) -> Iterator[Piece]:
        return _joined(self._pushed(text))

    def _pushed(self, text: str) -> Iterator[Piece]:
        self._text += text
        goes_on = not self._may_close(len(text)) if self._in_calls else self._text.isspace()
        if goes_on and len(self._text) * SHARE < self._held:
            return
        # Otherwise one by one, so that what ends a region is the last of `_unread`.
        yield from self._feed([self._text] if goes_on else self._text)

    def _may_close(self, length: int) -> bool:
        """Whether the calls may end in the last `length` characters."""
        close = self._template.fields[CALLS].close_re
        if close is None:
            return False
        before = "".join(self._unread[-MAX_CLOSE:])[-MAX_CLOSE:] if len(self._text) < length + MAX_CLOSE else ""
        text = (before + self._text)[-MAX_CLOSE - length :]
        return bool(close.search(text, partial=True).start() < len(text))

    def _feed(self, texts: Iterable[str]) -> Iterator[Piece]:
        self._text = ""
        for text in texts:
            if self._parser is None:
                yield from self._speech.say(text)
                continue
            self._unread.append(text)
            self._fed += len(text)
            self._held += len(text)
            try:
                events = self._parser.feed(text)
            except (ValueError, KeyError, RecursionError):
                yield from self._give_up()
            else:
                yield from self._pieces(events)

    def finish(self, *, cut: bool = False, stop: str | None = None) -> Iterator[Piece]:
        yield from _joined(self._feed(self._text))
        if stop is not None:
            calls, held = self._template.fields[CALLS], "".join(self._unread)
            found = None if calls.open_re is None else calls.open_re.search(held, partial=True)
            begins = self._in_calls or (found is not None and len(found[0].strip()) > 1)  # one character is text
            is_whole = calls.close_re is not None and calls.close_re.search(held[-MAX_CLOSE:] + stop) is not None
            cut = begins and not is_whole
        if self._parser is not None and cut and self._held:
            self._is_cut = self._in_calls
            self._speech.drop_space()
        elif self._parser is not None:
            try:
                events = self._parser.finalize()[1]
            except (ValueError, KeyError, RecursionError):
                yield from self._give_up()
            else:
                yield from self._pieces(events)
        if not self.calls:
            yield from self._speech.finish()

    def _pieces(self, events: list[dict[str, Any]]) -> Iterator[Piece]:
        for event in events:
            kind, is_calls = event["type"], event["field"] == CALLS
            if is_calls and kind != "region_chunk":
                self._in_calls = kind == "region_open"
            if kind == "region_close" and is_calls:
                calls = read_calls(event["value"], self._tools)
                if calls is None:
                    yield from self._speech.say("".join(self._unread))
                self._keep("")
                for name, arguments in calls or ():
                    self._speech.drop_space()
                    yield from self._call(self._form, name, arguments)
            elif kind == "region_chunk" and not is_calls:
                self._keep("".join(self._unread).rpartition(event["text"])[2])
                yield from self._speech.say(event["text"])
                if self._fed > MAX_FED and not self._held and event["field"] == self._template.implicit:
                    self._parser, self._fed = ResponseParser(self._template, prefix=""), 0

    def _keep(self, unread: str) -> None:
        """What of the text the parser has not told."""
        self._unread, self._held = [unread] if unread else [], len(unread)

    def _give_up(self) -> Iterator[Piece]:
        """What the parser could not read is content, and so is all that follows."""
        self._parser = None
        yield from self._speech.say("".join(self._unread))


def _joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The pieces, content that follows content as one."""
    said = ""
    for piece in pieces:
        if isinstance(piece, Content):
            said += piece.text
            continue
        if said:
            yield Content(said)
            said = ""
        yield piece
    if said:
        yield Content(said)
