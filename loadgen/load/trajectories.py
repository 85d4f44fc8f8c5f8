"""MLPerf's traces of agents: the flat JSONL of https://github.com/mlcommons/endpoints (Apache-2.0), a row for each
message of a conversation, in the order of its turns. Each row of the user or of tools is a call. It has the
conversation as it was recorded up to there, whatever the model has answered meanwhile. The next call comes when the
answer is there, and the recorded delay is over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from loadgen.errors import LoadgenError
from loadgen.load.lines import parse_line

METADATA = b'"_type": "dataset_metadata"'
"""A row with it is about the trace."""
Message = dict[str, Any]


class _Result(BaseModel):
    tool_call_id: str
    content: str


class _Row(BaseModel):
    """A message. What it has beside these fields is for the client's own scores."""

    model_config = ConfigDict(strict=True)

    conversation_id: Annotated[str, Field(pattern=r"^[ -~]+$")]
    turn: Annotated[int, Field(ge=1)]
    role: Literal["user", "assistant", "tool"]
    content: str | None = None
    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_results: list[_Result] | None = None
    reasoning_content: str | None = None
    delay_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None

    def messages(self) -> list[Message]:
        """The same as chats have it."""
        if self.tool_results:
            return [{"role": "tool", **result.model_dump()} for result in self.tool_results]
        extras = {name: getattr(self, name) for name in ("tool_calls", "reasoning_content")}
        said = {name: value for name, value in extras.items() if value is not None}
        return [{"role": self.role, "content": self.content, **said}]


@dataclass(frozen=True, slots=True)
class Turn:
    """One call: the messages that are new since the call before, and how long after its answer they come."""

    new: list[Message]
    delay_s: float
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One conversation, which begins `starts_s` after the replay does, or later."""

    id: str
    tools: list[dict[str, Any]] | None
    turns: list[Turn]
    starts_s: float = 0.0

    @property
    def characters(self) -> int:
        """Of all its messages and tools."""
        return sum(len(json.dumps(each)) for turn in self.turns for each in turn.new) + len(json.dumps(self.tools))

    def plain(self) -> Trajectory:
        """The conversation for servers and models without tools: none is offered, and calls and results are text."""
        turns = [replace(turn, new=[_as_text(message) for message in turn.new]) for turn in self.turns]
        return replace(self, tools=None, turns=turns)

    def shortened(self, calls: int, characters: float) -> Trajectory:
        """Its first calls, at most so many, with all texts shortened alike: to at most so many characters together."""
        first = replace(self, turns=self.turns[:calls])
        share = min(1.0, characters / first.characters)
        return replace(first, turns=[replace(turn, new=[_cut(m, share) for m in turn.new]) for turn in first.turns])

    def salted(self, repeat: str) -> Trajectory:
        """The conversation, which shares no prefix with others, nor with its own repetitions. Raises `LoadgenError`."""
        first = self.turns[0].new[0]
        if first["role"] != "system":
            raise LoadgenError(f"conversation {self.id} has no system prompt to salt")
        salts = [blake2b(text.encode(), digest_size=2).hexdigest() for text in (repeat, self.id)]
        system = {**first, "content": f"[salt: {salts[0]}]\n\n{first['content']}\n\n[salt: {salts[1]}]"}
        return replace(self, turns=[replace(self.turns[0], new=[system, *self.turns[0].new[1:]]), *self.turns[1:]])


def read_trace(path: Path, lines: list[tuple[str, bytes]]) -> list[Trajectory]:
    """The conversations of a trace's lines. Raises `LoadgenError`, which names the line and field of what is wrong."""
    rows = [parse_line(_Row, *line, "a trace has one message a line") for line in lines]
    groups = [(name, list(group)) for name, group in groupby(rows, key=lambda row: row.conversation_id)]
    if not groups or len(dict(groups)) < len(groups):
        problem = "the rows of a conversation are not together" if groups else "there is no conversation"
        raise LoadgenError(f"{path}: {problem}")
    return [_trajectory(name, group) for name, group in groups]


def _trajectory(name: str, rows: list[_Row]) -> Trajectory:
    system = next((row.system for row in rows if row.system), None)
    new: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    turns: list[Turn] = []
    for row in sorted(rows, key=lambda row: row.turn):
        new += row.messages()
        if row.role != "assistant":
            turns.append(Turn(new, row.delay_seconds, row.max_new_tokens))
            new = []
    if not turns:
        raise LoadgenError(f"conversation {name} has no row of the user")
    return Trajectory(name, next((row.tools for row in rows if row.tools), None), turns)


def _as_text(message: Message) -> Message:
    """The message without tools: calls behind its text, as JSON, and results as the user's words."""
    parts = (message.get("reasoning_content"), message.get("content"), *(message.get("tool_calls") or ()))
    text = "\n".join(part if isinstance(part, str) else json.dumps(part["function"]) for part in parts if part)
    return {"role": "user" if message["role"] == "tool" else message["role"], "content": text}


def _cut(message: Message, share: float) -> Message:
    """The message with that share of its text; calls of tools stay whole."""
    text = message.get("content")
    return message if not text else {**message, "content": text[: max(1, int(share * len(text)))]}
