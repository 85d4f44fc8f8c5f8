"""From a turn's tokens to its text: incremental decoding, the stop strings that only text can show, and pauses."""

import asyncio
import codecs
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from app.domain.values import FinishReason, TokenLogprobs
from app.engine_process.turn import TokenRun, Turn
from app.messages import Paused, PromptScored, Reading, Started, TurnFinished
from app.text.tokenizer import Tokens

MAX_BEGUN = 3
"""Bytes of UTF-8 of a character that lacks its last one."""


class Detokenizer:
    """The text of one turn, piece by piece, without special tokens but those that are `shown`.

    What `push` returns, with one `flush` at the end, makes up `Tokens.decode` of all the tokens: a character that
    is not complete is held back. (In a byte-fallback vocabulary, bytes that are not UTF-8 are the exception:
    there `decode` takes back whole characters before the bad byte, and text that was sent cannot be.) Text that goes on
    `after_text` keeps a leading space that the decoders of SentencePiece models take from the start of a text.
    """

    def __init__(
        self, tokens: Tokens, *, after_text: bool, shown: frozenset[int] = frozenset(), begun: bytes = b""
    ) -> None:
        """`after_text` says whether the tokens go on from text before them, which has `begun` a character."""
        self._tokens = tokens
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(begun)
        self._drop_space = tokens.drops_first_space and not after_text

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text they complete, which may be empty."""
        return self._decode(b"".join(map(self._text_bytes, token_ids)))

    def flush(self) -> str:
        """The rest, with U+FFFD for a character that was never completed."""
        return self._decode(b"", final=True)

    def _text_bytes(self, token_id: int) -> bytes:
        return self._tokens.token_bytes(token_id) if token_id in self._shown else self._tokens.text_bytes(token_id)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if text and self._drop_space:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


def begun_character(tokens: Tokens, token_ids: Sequence[int]) -> bytes:
    """The bytes at the end of a text that are the beginning of a character."""
    end = b""
    for token_id in reversed(token_ids):
        end = tokens.text_bytes(token_id) + end
        if len(end) >= MAX_BEGUN:
            break
    reading = codecs.getincrementaldecoder("utf-8")(errors="replace")
    reading.decode(end)
    begun, _ = reading.getstate()
    return begun


def whole_pieces(tokens: Tokens, token_ids: Sequence[int], start: int = 0) -> list[str]:
    """The text of a history from a position on, cut at its tokens, special ones included: what each completes. A
    character belongs to the token that has its last byte.
    """
    begun = begun_character(tokens, token_ids[:start]) if start else b""
    reading = Detokenizer(tokens, after_text=start > 0, shown=tokens.special_ids, begun=begun)
    pieces = [reading.push([token_id]) for token_id in token_ids[start:]]
    if pieces:
        pieces[-1] += reading.flush()
    return pieces


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


TextItem = Started | PromptScored | Reading | TextChunk | Paused | TurnFinished


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
    begun: bytes = b""
    """Of a character that the prompt begins and the text completes."""


class TurnReader:
    """One turn as text, read in stretches: each time it is iterated, from where it was left to its next pause or its
    end. Of several who iterate it at once, each waits for the one before. It keeps all that was read.

    Its items are those of the `Turn`, with every `TokenRun` as a `TextChunk`. What a pause finds undecided, of a
    character or a stop string, is decided by the tokens after it.

    A stop string ends the turn as `stop`, with the token that completes it as the last one, even where the turn had
    already ended by itself with more. As with stop tokens, none ends it before `min_tokens` tokens: earlier text is not
    searched.
    """

    def __init__(
        self,
        turn: Turn,
        tokens: Tokens,
        rule: TextRule,
        on_stop: Callable[[int], None],
        settled: Callable[[], Awaitable[None]],
    ) -> None:
        """When a stop string is complete, `on_stop` is called with the number of generated tokens that stay in the
        history; it must see to a `Cancel` with that `keep`. `settled` is awaited before the `TurnFinished`, so that a
        finished turn is durable. Its error takes the place of the `TurnFinished`, which `finished` still has.
        """
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
        self.finished: TurnFinished | None = None
        """How the turn has ended; it may have failed to become durable."""
        self.readings: list[Reading] = []
        """What has been read inside the model."""
        self._on_stop = on_stop
        self._settled = settled
        self._text: list[str] = []
        self._detokenizer = Detokenizer(tokens, after_text=True, shown=rule.shown, begun=rule.begun)
        self._matcher = StopMatcher(rule.stop)
        self._reading = asyncio.Lock()
        self._end: Paused | TurnFinished | None = None

    @property
    def text(self) -> str:
        """The text so far, but for what may yet become part of a stop string or of a character."""
        return "".join(self._text)

    @property
    def all_logprobs(self) -> list[TokenLogprobs]:
        """`logprobs`, and those of the tokens that are there but have not been read."""
        return [*(self.logprobs or ()), *self.turn.unread_logprobs]

    async def __aiter__(self) -> AsyncIterator[TextItem]:
        async with self._reading:
            ticket = self.turn.ticket
            if self._end is not None and self._end.ticket == ticket:
                yield self._end  # an earlier reader has read this stretch too
                return
            async for item in self.turn:
                if isinstance(item, TokenRun):
                    if not self._stopped:
                        yield self._read(item)
                elif isinstance(item, Paused):
                    # One of an earlier ticket was for a reader that left without it.
                    if item.ticket == ticket and not self._stopped:
                        self._end = item
                        yield item
                        return
                elif isinstance(item, TurnFinished):
                    already = self._stopped
                    tail = self._show(self._detokenizer.flush()) + self._matcher.flush()
                    if tail or self._stopped != already:
                        yield self._take(TextChunk(tail, stop=None if already else self._matcher.matched))
                    self.finished = self._finish(item)
                    await self._settled()
                    self._end = self.finished
                    yield self.finished
                else:
                    if isinstance(item, Reading):
                        self.readings.append(item)
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
        self._read(run)

    @property
    def _stopped(self) -> bool:
        return self._matcher.matched is not None

    def _read(self, run: TokenRun) -> TextChunk:
        """Decode `run` up to and including the token that completes a stop string."""
        text: list[str] = []
        for token_id in run.token_ids:
            self.token_ids.append(token_id)
            text.append(self._show(self._detokenizer.push((token_id,))))
            if self._stopped:
                break
        taken = len(text)
        token_ids, logprobs = tuple(run.token_ids[:taken]), tuple(run.logprobs[:taken])
        if self.logprobs is not None:
            self.logprobs += logprobs
        return self._take(TextChunk("".join(text), token_ids, logprobs, self._matcher.matched))

    def _take(self, chunk: TextChunk) -> TextChunk:
        self._text.append(chunk.text)
        return chunk

    def _show(self, text: str) -> str:
        """What may be shown now that `text` has come; announces the first match."""
        if self._stopped:
            return ""
        if len(self.token_ids) < self.rule.min_tokens:
            return text
        shown = self._matcher.push(text)
        if self._matcher.matched is not None:
            self._on_stop(len(self.token_ids))
        return shown

    def _finish(self, finished: TurnFinished) -> TurnFinished:
        if not self._stopped:
            return finished
        usage = replace(finished.usage, completion_tokens=len(self.token_ids))
        history = usage.prompt_tokens + len(self.token_ids)
        return structs.replace(finished, reason=FinishReason.STOP, usage=usage, history_tokens=history)
