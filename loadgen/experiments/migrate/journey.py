"""One session that moves, beside one that stays, and one that is computed from scratch where the other has gone."""

import asyncio
import math
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from client import AsyncSession
from loadgen.load.prompts import TokenIds
from loadgen.load.stopwatch import Stopwatch
from loadgen.targets.subject import Subject, greedy


@dataclass(frozen=True, slots=True)
class Said:
    """What is said: `history` is what moves, `new` is said after that, `other` is as long as both and says something
    else, so that it shares nothing.
    """

    history: TokenIds
    new: TokenIds
    other: TokenIds


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A turn after the move: seconds to its first token, and how many prompt tokens had no KV and were computed."""

    seconds: float
    computed_tokens: int
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class Journey:
    """One move, in seconds and bytes.

    `stayed` is the turn on the server that the session came from, of the session that never moved; `moved` the same
    turn on the other server; `anew` a turn there of a history as long, which has to be computed first.
    """

    tokens: int
    repeat: int
    file_bytes: int
    export_s: float
    import_s: float
    stayed: FirstToken
    moved: FirstToken
    anew: FirstToken

    @property
    def same(self) -> int:
        """How many tokens of the two answers are the same until the first that differs."""
        pairs = zip(self.stayed.token_ids, self.moved.token_ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def equal(self) -> bool:
        """Whether the session says on the other server what it says where it was."""
        return self.stayed.token_ids == self.moved.token_ids

    @property
    def move_s(self) -> float:
        """From the beginning of the export to the first token on the other server."""
        return self.export_s + self.import_s + self.moved.seconds


async def travel(origin: Subject, goal: Subject, said: Said, decoded: int, repeat: int, file: Path) -> Journey:
    """Prefill on `origin`, export to `file`, import on `goal`, and go on in both places.

    Raises `client.DjinnError` where a server refuses, and `OSError`.
    """
    watch = Stopwatch()
    async with origin.session() as session:
        await session.generate(**greedy(said.history, 1))
        watch.lap()
        await session.export_to(file)
        export_s = watch.lap()
        async with goal.imported(file) as arrived:
            import_s = watch.lap()
            moved = await _first_token(arrived, said.new, decoded)
        stayed = await _first_token(session, said.new, decoded)
    async with goal.session() as fresh:
        anew = await _first_token(fresh, said.other, 1)
    size = (await asyncio.to_thread(file.stat)).st_size
    return Journey(len(said.history), repeat, size, export_s, import_s, stayed=stayed, moved=moved, anew=anew)


async def _first_token(session: AsyncSession, new: TokenIds, tokens: int) -> FirstToken:
    """Run a turn of exactly `tokens` tokens."""
    watch = Stopwatch()
    seconds = math.nan
    async with session.stream(**greedy(new, tokens)) as stream:
        async for event in stream:
            if event.token_ids and math.isnan(seconds):
                seconds = watch.lap()
    usage = stream.turn.usage
    return FirstToken(seconds, usage.prompt_tokens - usage.cached_tokens, stream.turn.token_ids)
