"""Reads a turn through its pauses, and keeps all of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from app.bridge.turn import TokenRun, Turn
from app.domain.values import TokenLogprobs
from app.messages import Paused, TurnFinished
from app.text.detokenizer import Detokenizer
from app.text.generation import TextChunk, TextItem, TextTurn
from app.text.tokenizer import Tokens


@dataclass(frozen=True, slots=True)
class TextRule:
    """How a turn is read: the stop strings in its text, and which log-probabilities are kept."""

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    """No stop string ends the turn before."""
    logprobs: int | None = None
    """Alternatives to keep of each token; None: no log-probabilities are kept."""
    shown: frozenset[int] = frozenset()
    """Special tokens that are part of the text."""


class TurnReader:
    """One turn, read in stretches: each time it is iterated, from where it was left to its next pause or its end.

    Of several who iterate it at once, each waits for the one before.
    """

    def __init__(
        self,
        turn: Turn,
        tokens: Tokens,
        rule: TextRule,
        on_stop: Callable[[int], None],
        settled: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_stop` and `settled` are those of `TextTurn`."""
        self.turn = turn
        self.rule = rule
        self.token_ids: list[int] = []
        """Everything generated so far."""
        self.logprobs: list[TokenLogprobs] | None = None if rule.logprobs is None else []
        """One for each of `token_ids`, or None if the turn did not ask for them."""
        self.written: list[bytes] = []
        """The first of `logprobs`, in slices, as an answer has told of them: those of a turn that pauses often are told
        at each pause.
        """
        self._text: list[str] = []
        detokenizer = Detokenizer(tokens, after_text=True, shown=rule.shown)
        self._text_turn = TextTurn(turn, detokenizer, rule.stop, on_stop, settled, rule.min_tokens)
        self._reading = asyncio.Lock()
        self._end: Paused | TurnFinished | None = None

    @property
    def text(self) -> str:
        """The text so far, but for what may yet become part of a stop string or of a character."""
        return "".join(self._text)

    @property
    def finished(self) -> TurnFinished | None:
        """How the turn has ended; it may have failed to become durable."""
        return self._text_turn.finished

    @property
    def all_logprobs(self) -> list[TokenLogprobs]:
        """`logprobs`, and those of the tokens that are there but have not been read."""
        return [*(self.logprobs or ()), *self.turn.mailbox.logprobs]

    async def __aiter__(self) -> AsyncIterator[TextItem]:
        async with self._reading:
            if self._end is not None and self._end.ticket == self.turn.ticket:
                yield self._end  # an earlier reader has read this stretch too
                return
            async for item in self._text_turn:
                if isinstance(item, TextChunk):
                    self._take(item)
                elif isinstance(item, Paused | TurnFinished):
                    self._end = item
                yield item

    async def read(self) -> Paused | TurnFinished:
        """Read one stretch, and return how it ended."""
        *_, end = [item async for item in self]
        assert isinstance(end, Paused | TurnFinished)
        return end

    def replay(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Take what was generated before, in a paused turn that this one goes on with."""
        run = TokenRun()
        run.token_ids, run.logprobs = list(token_ids), list(logprobs)
        self._take(self._text_turn.replay(run))

    def _take(self, chunk: TextChunk) -> None:
        self._text.append(chunk.text)
        self.token_ids += chunk.token_ids
        if self.logprobs is not None:
            self.logprobs += chunk.logprobs
