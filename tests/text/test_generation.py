"""Text of a turn: stop strings against a search of the whole text, and what the history keeps after a match."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.domain.values import FinishReason, Ticket, TokenLogprobs, TurnUsage
from app.engine_process.turn import Turn
from app.messages import Started, Token, TurnFinished
from app.model_store.saved import ModelTokenizer
from app.text.generation import StopMatcher, TextChunk, TextItem, TextRule, TurnReader
from app.text.tokenizer import Tokens
from tests.hugging_face import byte_tokenizer

TICKET = Ticket(1)
PROMPT_TOKENS = 7


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(ModelTokenizer.of(byte_tokenizer(512)), frozenset({257}))


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


@given(text=LETTERS, stops=STOPS, cuts=CUTS)
def test_matcher_holds_back_only_what_may_begin_a_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces_of(text, cuts):
        seen += piece
        shown += matcher.push(piece)
        if matcher.matched:
            return
        held = seen[len(shown) :]
        assert seen == shown + held
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        assert not any(seen.endswith(stop[:k]) for stop in stops for k in range(len(held) + 1, len(stop)))


def events_of(token_ids: Sequence[int]) -> list[Token | TurnFinished]:
    """What the engine sends for a turn that makes these tokens and ends by itself."""
    made: list[Token | TurnFinished] = [
        Token(TICKET, token_id, TokenLogprobs(token_id, -1.0)) for token_id in token_ids
    ]
    usage = TurnUsage(prompt_tokens=PROMPT_TOKENS, completion_tokens=len(token_ids))
    return [*made, TurnFinished(TICKET, FinishReason.LENGTH, usage, PROMPT_TOKENS + len(token_ids))]


async def read(
    tokens: Tokens, token_ids: Sequence[int], stop: Sequence[str] = (), *, min_tokens: int = 0, slow: bool
) -> tuple[list[TextItem], list[int]]:
    """All items of the turn, and the `keep`s asked for. A slow reader begins when the engine has sent everything."""
    turn, keeps = Turn(TICKET), list[int]()
    reader = TurnReader(turn, tokens, TextRule(tuple(stop), min_tokens), keeps.append, settled)

    async def send() -> None:
        turn.deliver(Started(TICKET, 0))
        for event in events_of(token_ids):
            turn.deliver(event)
            if not slow:
                await asyncio.sleep(0)

    async with asyncio.timeout(10):
        if slow:
            await send()
            return [item async for item in reader], keeps
        sending = asyncio.create_task(send())
        items = [item async for item in reader]
        await sending
        return items, keeps


def text_of(items: Sequence[TextItem]) -> str:
    return "".join(item.text for item in items if isinstance(item, TextChunk))


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    ("said", "stops", "text", "kept", "found"),
    [
        ("one, two, three", [", t"], "one", 6, ", t"),
        ("one, two, three", ["z", "thr", ", t"], "one", 6, ", t"),
        ("one, two, three", ["two", "wo"], "one, ", 8, "two"),
        ("abc", ["c"], "ab", 3, "c"),  # with the last token
        ("almost sto", ["stop"], "almost sto", None, None),  # what was held back comes at the end
    ],
)
async def test_a_stop_string_ends_the_turn_after_the_token_that_completes_it(
    tokens: Tokens, slow: bool, said: str, stops: list[str], text: str, kept: int | None, found: str | None
) -> None:
    token_ids = tokens.encode(said, add_special_tokens=False)
    items, keeps = await read(tokens, token_ids, stops, slow=slow)
    chunks, end = [item for item in items if isinstance(item, TextChunk)], items[-1]
    assert isinstance(end, TurnFinished)
    assert text_of(items) == text
    assert keeps == ([] if kept is None else [kept])
    count = len(token_ids) if kept is None else kept
    assert end.reason is (FinishReason.LENGTH if kept is None else FinishReason.STOP)
    assert (end.usage.completion_tokens, end.history_tokens) == (count, PROMPT_TOKENS + count)
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == token_ids[:count]
    assert sum(len(chunk.logprobs) for chunk in chunks) == count
    assert [chunk.stop for chunk in chunks] == [None] * (len(chunks) - 1) + [found]


async def test_text_before_min_tokens_does_not_stop_the_turn(tokens: Tokens) -> None:
    token_ids = tokens.encode("a.b.c.", add_special_tokens=False)
    items, keeps = await read(tokens, token_ids, ["."], min_tokens=4, slow=True)
    assert (text_of(items), keeps) == ("a.b", [4])


async def settled() -> None:
    """For a turn that nobody keeps."""
