"""A turn that is read through its pauses is the turn as it is without them, whoever reads which part of it."""

import asyncio
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
from app.text.generation import TextChunk, TextRule, TurnReader
from app.text.tokenizer import Tokens
from tests.hugging_face import byte_tokenizer

TOKENS = Tokens(ModelTokenizer.of(byte_tokenizer(512)), frozenset({257}))
PROMPT_TOKENS = 7


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
        return await asyncio.wait_for(self.reader.read(), 5)

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
STOPS = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3)


@given(text=TEXTS, stops=STOPS, pauses=st.lists(st.integers(0, 40), max_size=5))
@example(text="aab", stops=["ab"], pauses=[2])
@example(text="a€b", stops=[], pauses=[2])
@example(text="ab", stops=["b"], pauses=[2])
def test_pauses_change_nothing_of_the_turn(text: str, stops: list[str], pauses: list[int]) -> None:
    token_ids = ids_of(text)
    whole, parted = Driven(stops), Driven(stops)
    expected = result(whole, asyncio.run(whole.run(token_ids)))
    places = sorted({pause % (len(token_ids) + 1) for pause in pauses})
    assert result(parted, asyncio.run(parted.run(token_ids, places))) == expected


@given(text=TEXTS, stops=STOPS, cut=st.integers(0, 40), seen=st.integers(0, 40))
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
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    driven.send(ids_of("b"))
    driven.finish()
    assert isinstance(await driven.read(), TurnFinished)
    assert driven.reader.text == "ab"


async def test_a_second_reader_waits_for_the_first_and_each_gets_its_own_end() -> None:
    driven = Driven()
    first = asyncio.create_task(driven.reader.read())
    await asyncio.sleep(0)
    driven.send(ids_of("a"))
    driven.pause()
    driven.resume()
    second = asyncio.create_task(driven.reader.read())
    driven.send(ids_of("b"))
    driven.finish()
    assert isinstance(await asyncio.wait_for(first, 5), Paused)
    assert isinstance(await asyncio.wait_for(second, 5), TurnFinished)
    assert driven.reader.text == "ab"


async def test_a_pause_that_a_cancel_overtakes_is_not_told() -> None:
    driven = Driven()
    driven.send(ids_of("a"))
    driven.turn.ending = True
    driven.pause()
    driven.finish(FinishReason.CANCELLED)
    end = await driven.read()
    assert isinstance(end, TurnFinished)
    assert end.reason is FinishReason.CANCELLED


async def test_every_reader_of_a_turn_that_fails_is_told() -> None:
    driven = Driven()
    driven.turn.deliver(Failed(driven.turn.ticket, EngineError("the step failed")))
    for _ in range(2):
        with pytest.raises(EngineError, match="the step failed"):
            await driven.read()
