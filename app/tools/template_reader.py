"""Answers of a checkpoint that says itself how they are read, by Transformers' parser."""

from collections.abc import Iterator, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from app.tools.definitions import Tool
from app.tools.formats import ToolFormat
from app.tools.reader import CallArguments, CallBegun, Content, Piece, Speech, new_call_id, read_calls

CALLS = "tool_calls"


class TemplateReader:
    """An `AnswerReader` for a `response_template`. A call comes once it is complete."""

    def __init__(self, form: ToolFormat, template: ResponseTemplate, tools: Sequence[Tool]) -> None:
        """`tools` may be called; a call of any other is content."""
        self._form = form
        self._names = frozenset(tool.name for tool in tools)
        self._parser: ResponseParser | None = ResponseParser(template, prefix="")
        self._unread: list[str] = []
        """Text of a region of calls that is open, or in the parser's hands."""
        self._speech = Speech()
        self.calls = 0

    @property
    def is_whole(self) -> bool:
        return self.calls > 0

    def push(self, text: str) -> Iterator[Piece]:
        said = ""
        for piece in self._pushed(text):
            if isinstance(piece, Content):
                said += piece.text
                continue
            if said:
                yield Content(said)
                said = ""
            yield piece
        if said:
            yield Content(said)

    def _pushed(self, text: str) -> Iterator[Piece]:
        for place, character in enumerate(text):  # so that what ends a region is the last of `_unread`
            if self._parser is None:
                yield from self._speech.say(text[place:])
                return
            self._unread.append(character)
            try:
                events = self._parser.feed(character)
            except (ValueError, KeyError, RecursionError):
                yield from self._give_up()
            else:
                yield from self._pieces(events)

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        if self._parser is not None and cut and self._unread:
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
            if event["type"] == "region_close" and event["field"] == CALLS:
                calls = read_calls(event["value"], self._names)
                if calls is None:
                    yield from self._speech.say("".join(self._unread))
                self._unread.clear()
                for name, arguments in calls or ():
                    self._speech.drop_space()
                    self.calls += 1
                    yield CallBegun(self.calls - 1, new_call_id(self._form), name)
                    yield CallArguments(self.calls - 1, arguments)
            elif event["type"] == "region_chunk" and event["field"] != CALLS:
                self._unread.clear()
                yield from self._speech.say(event["text"])

    def _give_up(self) -> Iterator[Piece]:
        """What the parser could not read is content, and so is all that follows."""
        self._parser = None
        yield from self._speech.say("".join(self._unread))
