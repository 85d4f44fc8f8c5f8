"""Text of a turn: stop strings against a search of the whole text, and what the history keeps after a match. A turn
that is read through its pauses is the turn as it is without them, whoever reads which part of it.
"""

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import Pass
from app.domain.errors import EngineError
from app.domain.values import FinishReason, Ticket, TokenLogprobs, TurnUsage
from app.engine_process.turn import Turn
from app.messages import Failed, Paused, Started, Token, TurnFinished
from app.model_store.saved import ModelTokenizer
from app.text.generation import StopMatcher, TextChunk, TextRule, TurnReader
from app.text.tokenizer import Tokens
from tests.hugging_face import byte_tokenizer
from tests.waiting import settled

PROMPT_TOKENS = 7


def search(text: str, stops: Sequence[str]) -> int | None:
    """Where the text must be cut: at the start of the first occurrence to be complete, of several the longest."""
    for end in range(len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return min(found)
    return None


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


LETTERS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
CUTS = st.lists(st.integers(0, 100), max_size=12)


@given(text=LETTERS, stops=STOPS, cuts=CUTS)
@example(text="aabab", stops=["abab", "ba"], cuts=[2])
@example(text="aab", stops=["aab", "ab"], cuts=[1, 2])
def test_matcher_finds_what_a_search_of_the_whole_text_finds(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces_of(text, cuts):
        if not matcher.matched:
            shown += matcher.push(piece)
    expected = search(text, stops)
    assert (matcher.matched is None) == (expected is None)
    assert matcher.matched is None or text.startswith(matcher.matched, expected)
    assert shown + ("" if matcher.matched else matcher.flush()) == text[:expected]


TOKENS = Tokens(ModelTokenizer.of(byte_tokenizer(512)), frozenset({257}))


def ids_of(text: str) -> list[int]:
    return TOKENS.encode(text, add_special_tokens=False)


class Driven:
    """A turn whose events are sent by hand, and its reader. `keeps` are the cuts that stop strings have asked for."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.turn = Turn(Ticket(1))
        self.keeps: list[int] = []
        self.made = 0
        self.reader = TurnReader(self.turn, TOKENS, TextRule(tuple(stop), logprobs=0), self.stop, self.settled)

    def stop(self, keep: int) -> None:
        """Do what the engine does about the `Cancel`."""
        self.keeps.append(keep)
        self.finish(FinishReason.STOP)

    async def settled(self) -> None:
        """Nothing is kept."""

    def send(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.made += 1
            self.turn.deliver(Token(self.turn.ticket, token_id, TokenLogprobs(token_id, -self.made)))

    def pause(self) -> None:
        info = CheckpointInfo(1, 0, 1, 64, "float32", 256, Pass.DECODE, "bp_1", 0.1, 1.0)
        self.turn.deliver(Paused(self.turn.ticket, info, self.usage()))

    def resume(self) -> None:
        self.turn.ticket = Ticket(self.turn.ticket + 1)
        self.turn.deliver(Started(self.turn.ticket, 0))

    def finish(self, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.turn.deliver(TurnFinished(self.turn.ticket, reason, self.usage(), PROMPT_TOKENS + self.made))

    def usage(self) -> TurnUsage:
        return TurnUsage(prompt_tokens=PROMPT_TOKENS, completion_tokens=self.made)

    async def read(self) -> Paused | TurnFinished:
        return await asyncio.wait_for(self.reader.read(), 30)

    async def run(self, token_ids: Sequence[int], pauses: Sequence[int] = ()) -> TurnFinished:
        """Make these tokens, and pause after each of so many. Returns how the turn ended."""
        for pause in pauses:
            self.send(token_ids[self.made : pause])
            self.pause()
            end = await self.read()
            if isinstance(end, TurnFinished):
                return end
            self.resume()
        self.send(token_ids[self.made :])
        self.finish()
        end = await self.read()
        assert isinstance(end, TurnFinished)
        return end


def result(driven: Driven, end: TurnFinished) -> tuple[object, ...]:
    reader = driven.reader
    return reader.text, reader.token_ids, reader.logprobs, driven.keeps, end.reason, end.usage.completion_tokens


TEXTS = st.text("ab€\N{GRINNING FACE}", min_size=1, max_size=12)
FEW_STOPS = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3)


@given(text=TEXTS, stops=FEW_STOPS, pauses=st.lists(st.integers(0, 40), max_size=5))
@example(text="aab", stops=["ab"], pauses=[2])
@example(text="a€b", stops=[], pauses=[2])
@example(text="ab", stops=["b"], pauses=[2])
def test_pauses_change_nothing_of_the_turn(text: str, stops: list[str], pauses: list[int]) -> None:
    token_ids = ids_of(text)
    whole, parted = Driven(stops), Driven(stops)
    expected = result(whole, asyncio.run(whole.run(token_ids)))
    places = sorted({pause % (len(token_ids) + 1) for pause in pauses})
    assert result(parted, asyncio.run(parted.run(token_ids, places))) == expected


@given(text=TEXTS, stops=FEW_STOPS, cut=st.integers(0, 40), seen=st.integers(0, 40))
@example(text="aab", stops=["ab"], cut=2, seen=2)
def test_a_fork_goes_on_with_what_was_there_read_or_not(text: str, stops: list[str], cut: int, seen: int) -> None:
    async def scenario() -> None:
        token_ids = ids_of(text)
        place = cut % (len(token_ids) + 1)
        whole, parent, child = Driven(stops), Driven(stops), Driven(stops)
        expected = result(whole, await whole.run(token_ids))
        parent.send(token_ids[: seen % (place + 1)])
        parent.pause()
        if isinstance(await parent.read(), TurnFinished):
            return
        parent.resume()
        parent.send(token_ids[parent.made : place])
        parent.pause()
        child.reader.replay(token_ids[:place], parent.reader.all_logprobs)
        child.made = place
        if child.keeps:  # read or not, the parent would have ended
            return
        child.send(token_ids[place:])
        child.finish()
        end = await child.read()
        assert isinstance(end, TurnFinished)
        assert result(child, end) == expected

    asyncio.run(scenario())


async def test_what_one_reader_leaves_unread_the_next_one_gets() -> None:
    driven = Driven()
    for text in ("ab", "c"):
        driven.send(ids_of(text))
        driven.pause()
        if text == "ab":
            driven.resume()
    *chunks, end = [item async for item in driven.reader]
    assert "".join(item.text for item in chunks if isinstance(item, TextChunk)) == "abc"
    assert isinstance(end, Paused)
    assert end.ticket == driven.turn.ticket


async def test_a_reader_that_leaves_in_the_middle_loses_nothing() -> None:
    driven = Driven()
    reading = asyncio.create_task(driven.reader.read())
    driven.send(ids_of("a"))
    await settled()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    driven.send(ids_of("b"))
    driven.finish()
    assert isinstance(await driven.read(), TurnFinished)
    assert driven.reader.text == "ab"


async def test_every_reader_of_a_turn_that_fails_is_told() -> None:
    driven = Driven()
    driven.turn.deliver(Failed(driven.turn.ticket, EngineError("the step failed")))
    for _ in range(2):
        with pytest.raises(EngineError, match="the step failed"):
            await driven.read()
