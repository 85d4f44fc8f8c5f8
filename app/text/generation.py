"""From a turn's tokens to its text: incremental decoding, and the stop strings that only text can show."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from app.bridge.turn import TokenRun, Turn
from app.domain.values import FinishReason, TokenLogprobs
from app.messages import Paused, PromptScored, Started, TurnFinished
from app.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Tokens as they come, and the text that they made certain: it may be empty or belong to earlier tokens.

    The tokens of a stop string are reported like any other; its text never is. `logprobs` has one entry per
    token, or none at all if the turn did not ask for them.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    stop: str | None = None
    """The stop string that ends the text here."""


TextItem = Started | PromptScored | TextChunk | Paused | TurnFinished


class StopMatcher:
    """Looks for stop strings in text that arrives in pieces.

    The match is the occurrence that is complete first; of those that end at the same character, the longest. So
    the result does not depend on how the text was cut into pieces. Text that may yet turn out to begin a stop
    string is held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """Take the next piece; returns what is safe to show. Nothing more may be pushed after a match."""
        pending = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := pending.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return pending[:start]
        safe = len(pending) - self._undecided(pending)
        self._held = pending[safe:]
        return pending[:safe]

    def flush(self) -> str:
        """What was held back, now that no more text can come."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class TextTurn:
    """One turn as text: the items of the `Turn`, with every `TokenRun` as a `TextChunk`.

    Iterate once for each `Submit` or `Resume`, one after the other: up to its `Paused` or the `TurnFinished`. What a
    pause finds undecided, of a character or a stop string, is decided by the tokens after it.

    When a stop string is complete, `on_stop` is called with the number of generated tokens that stay in the
    history, the one that completed the match included; it must see to a `Cancel` with that `keep`. The turn then
    ends as `stop` with that many tokens, even where it had already ended by itself with more. As with stop
    tokens, none ends the turn before `min_tokens` tokens: earlier text is not searched.

    `settled` is awaited before the `TurnFinished`, so that a finished turn is durable. Its error takes the place of
    the `TurnFinished`, which `finished` has all the same.
    """

    def __init__(
        self,
        turn: Turn,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        on_stop: Callable[[int], None],
        settled: Callable[[], Awaitable[None]],
        min_tokens: int = 0,
    ) -> None:
        self._turn = turn
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop)
        self._on_stop = on_stop
        self._settled = settled
        self._min_tokens = min_tokens
        self._generated = 0
        self._stopped = False
        self.finished: TurnFinished | None = None
        """How the turn has ended, durable or not."""

    def replay(self, run: TokenRun) -> TextChunk:
        """Take tokens that were generated before, in a turn that this one goes on with."""
        return self._read(run)

    async def __aiter__(self) -> AsyncIterator[TextItem]:
        ticket = self._turn.ticket
        async for item in self._turn:
            if isinstance(item, TokenRun):
                if not self._stopped:
                    yield self._read(item)
            elif isinstance(item, Paused):
                # One of an earlier ticket was for a reader that left without it.
                if item.ticket == ticket and not self._stopped:
                    yield item
                    return
            elif isinstance(item, TurnFinished):
                already = self._stopped
                tail = self._show(self._detokenizer.flush()) + self._matcher.flush()
                if tail or self._stopped != already:
                    yield TextChunk(tail, stop=None if already else self._matcher.matched)
                self.finished = self._finish(item)
                await self._settled()
                yield self.finished
            else:
                yield item

    def _read(self, run: TokenRun) -> TextChunk:
        """Decode `run` up to and including the token that completes a stop string."""
        text: list[str] = []
        for token_id in run.token_ids:
            self._generated += 1
            text.append(self._show(self._detokenizer.push((token_id,))))
            if self._stopped:
                break
        taken = len(text)
        token_ids, logprobs = tuple(run.token_ids[:taken]), tuple(run.logprobs[:taken])
        return TextChunk("".join(text), token_ids, logprobs, self._matcher.matched)

    def _show(self, text: str) -> str:
        """What may be shown now that `text` has come; announces the first match."""
        if self._stopped:
            return ""
        if self._generated < self._min_tokens:
            return text
        shown = self._matcher.push(text)
        self._stopped = self._matcher.matched is not None
        if self._stopped:
            self._on_stop(self._generated)
        return shown

    def _finish(self, finished: TurnFinished) -> TurnFinished:
        if not self._stopped:
            return finished
        usage = replace(finished.usage, completion_tokens=self._generated)
        history = usage.prompt_tokens + self._generated
        return replace(finished, reason=FinishReason.STOP, usage=usage, history_tokens=history)
