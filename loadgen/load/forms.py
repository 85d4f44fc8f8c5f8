"""Other forms of recorded agents as trajectories, and a small trace that needs no file.

- Mooncake's requests (https://github.com/kvcache-ai/Mooncake, FAST25-release): milliseconds of arrival, lengths, and an
  id for each `BLOCK` tokens of a prompt. Equal ids are equal text, so that prompts share the prefixes that were shared.
- TraceLab's rounds (https://github.com/uw-syfi/TraceLab, "Data format"): how many tokens each call of a session had,
  and when. A call whose input is shorter than the one before begins a conversation anew, as agents do that compact.
- Conversations: `id`, and `messages` with `role` and `content`. Each assistant's message answers a call.

Traces without texts get real text of as many tokens, reckoned by the characters of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from random import Random
from typing import Annotated, Any

from pydantic import BaseModel, Field

from loadgen.errors import LoadgenError
from loadgen.load.lines import parse_line, read_lines
from loadgen.load.prompts import FORM, Conversation, python_topics
from loadgen.load.trace import Tokens
from loadgen.load.trajectories import METADATA, Message, Trajectory, Turn, read_trace

BLOCK = 512
"""Tokens that one of Mooncake's ids stands for."""
GO_ON: Message = {"role": "user", "content": "Go on."}
_Count = Annotated[int, Field(ge=0)]


class _Request(BaseModel):
    timestamp: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: Annotated[list[int], Field(min_length=1)]


class _Event(BaseModel):
    event_type: str
    timestamp: datetime


class _Round(BaseModel):
    session_id: str
    round_index: _Count
    input_tokens_total: Tokens
    output_tokens: _Count
    timing_events: list[_Event] = []


def read_recorded(path: Path, per_token: float) -> list[Trajectory]:
    """The conversations of a trace of any form. Raises `LoadgenError`, which names the line and the field."""
    lines = [line for line in read_lines(path, "trace") if METADATA not in line[1]]
    try:
        fields = set(json.loads(lines[0][1])) if lines else {"turn"}
    except (ValueError, TypeError):  # what is wrong is told below
        fields = {"turn"}
    if "hash_ids" in fields:
        requests = [parse_line(_Request, *line, "a request a line") for line in lines]
        found = [_request(number, each, per_token) for number, each in enumerate(requests, 1)]
        return sorted(found, key=lambda each: each.starts_s)
    if "round_index" in fields:
        rounds = [parse_line(_Round, *line, "a round a line") for line in lines]
        rounds.sort(key=lambda each: (each.session_id, each.round_index))
        for one, other in pairwise(rounds):
            if (one.session_id, one.round_index) == (other.session_id, other.round_index):
                raise LoadgenError(f"{path}: session {one.session_id}: two rounds have round_index {one.round_index}")
        sessions = groupby(rounds, key=lambda each: each.session_id)
        return [each for name, found in sessions for each in _session(path, name, found, per_token)]
    if "messages" in fields:
        found = [_conversation(parse_line(Conversation, *line, FORM)) for line in lines]
        if len({each.id for each in found}) < len(found):
            raise LoadgenError(f"{path}: id: two conversations have the same")
        return found
    if "turn" not in fields:
        raise LoadgenError(
            f"{lines[0][0]}: no known form: a line has hash_ids (Mooncake's), round_index (TraceLab's), messages "
            f"(conversations) or turn (MLPerf's); got {', '.join(sorted(map(str, fields)))[:200] or 'no field'}"
        )
    return read_trace(path, lines)


@cache
def _corpus() -> str:
    return "\n\n".join(python_topics().documents)


def _text(name: object, characters: float) -> str:
    """So many characters, which begin with a mark of their own; equal for equal names."""
    corpus, count = _corpus(), max(1, int(characters))
    start = Random(f"{name}").randrange(len(corpus))
    text = f"[{name}] {corpus[start : start + count]}"
    while len(text) < count:
        text += corpus[: count - len(text)]
    return text[:count]


def _request(number: int, row: _Request, per_token: float) -> Trajectory:
    if not 0 <= len(row.hash_ids) * BLOCK - row.input_length < BLOCK:
        raise LoadgenError(f"request {number}: hash_ids must be one for each {BLOCK} tokens of input_length")
    prompt = "".join(_text(each, BLOCK * per_token) for each in row.hash_ids)[: int(row.input_length * per_token)]
    turn = Turn([{"role": "system", "content": prompt}, GO_ON], 0.0, row.output_length)
    return Trajectory(f"request-{number}", None, [turn], row.timestamp / 1e3)


def _session(path: Path, name: str, rounds: Iterator[_Round], per_token: float) -> Iterator[Trajectory]:
    turns: list[Turn] = []
    over: datetime | None = None
    had, answered, part, before = 0, 0, 1, 0
    for row in rounds:
        place = f"{name}, call {row.round_index}"
        events = [(each.event_type, each.timestamp.astimezone()) for each in row.timing_events]
        inputs = [at for kind, at in events if kind in ("user_message", "tool_result")]
        delay_s = 0.0 if over is None or not inputs else max(0.0, (max(inputs) - over).total_seconds())
        last = max((at for _, at in events), default=None)
        if over is not None and last is not None and last < over:
            where = f"{path}: session {name}, round {row.round_index}"
            raise LoadgenError(f"{where}: timing_events end before those of round {before}")
        if turns and row.input_tokens_total < had:
            yield Trajectory(f"{name}-{part}", None, turns)
            turns, part = [], part + 1
        new: list[Message]
        if turns:
            said = {"role": "assistant", "content": _text(f"{place}, answer", answered * per_token)}
            grown = (row.input_tokens_total - had - answered) * per_token
            new = [said, {"role": "user", "content": _text(place, grown)}]
        else:
            new = [{"role": "system", "content": _text(place, row.input_tokens_total * per_token)}, GO_ON]
        turns.append(Turn(new, delay_s, row.output_tokens or 1))
        had, answered, before, over = row.input_tokens_total, row.output_tokens, row.round_index, last
    yield Trajectory(f"{name}-{part}", None, turns)


def _conversation(found: Conversation) -> Trajectory:
    turns, new = list[Turn](), list[Message]()
    for message in found.messages:
        if message.role == "assistant" and new:
            turns.append(Turn(new, 0.0, None))
            new = []
        new.append(message.model_dump())
    if not turns:
        raise LoadgenError(f"conversation {found.id} has no message of the assistant that answers another")
    return Trajectory(found.id, None, turns)


def small_trace() -> list[Trajectory]:
    """Agents like those of MLPerf's edge trace (agentic_coding_2.5h.jsonl), always the same: as many calls, a task as
    long, and lognormal thoughts, commands, results and delays with its medians and spreads.
    """
    draw = Random(0)
    return [_agent(f"agent-{number}", draw) for number in range(8)]


def _agent(name: str, draw: Random) -> Trajectory:
    def some(what: str, median: float, sigma: float) -> str:
        return _text(f"{name}, {what}", median * draw.lognormvariate(0, sigma))

    system = {"role": "system", "content": "You solve tasks in a shell. Write one command at a time."}
    turns = [Turn([system, {"role": "user", "content": some("task", 5737, 0.3)}], 0.0, None)]
    for call in range(1, draw.randint(27, 61)):
        thought = some(f"thought {call}", 107, 1.4)
        said: dict[str, Any] = {"role": "assistant", "content": f"{thought}\n{some(f'command {call}', 175, 0.6)}"}
        result = {"role": "user", "content": some(f"result {call}", 419, 1.35)}
        turns.append(Turn([said, result], 0.063 * draw.lognormvariate(0, 1.1), None))
    return Trajectory(name, None, turns)
