"""The life of a turn: it begins with a `Submit`, advances by computed rows, and ends once."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from app.domain import FinishReason, TokenLogprobs
from app.errors import DjinnError
from app.gpu.sampling import Sampled, SampleRequest
from app.gpu.scheduler import Scheduler
from app.gpu.segments import Row
from app.gpu.sequence import Sequence, TurnState
from app.messages import Event, Failed, PromptScored, Submit, Token, TurnFinished


class Turns:
    """Changes sequences as their turns go, and says so in events."""

    def __init__(self, scheduler: Scheduler, max_model_len: int) -> None:
        self._scheduler = scheduler
        self._tiers = scheduler.placement.tiers
        self.max_model_len = max_model_len

    def begin(self, sequence: Sequence, command: Submit, keep: int) -> None:
        """Start a turn whose context is the first `keep` tokens of the history and then the command's own from there
        on.
        """
        dropped = tuple(sequence.tokens[keep:])
        self._tiers.truncate(sequence, keep)
        sequence.tokens.extend(command.token_ids[keep:] if command.replace else command.token_ids)
        context = len(sequence.tokens)
        sequence.turn = TurnState(command.ticket, command.sampling, command.stop, context, keep, dropped)
        if command.sampling.prompt_logprobs is not None:
            self._tiers.cut(sequence, 0)  # only computing the prompt gives its log-probabilities
        self._scheduler.enqueue(sequence)

    def score(self, row: Row, logprobs: Seq[TokenLogprobs]) -> Iterator[Event]:
        """Take the log-probabilities of the prompt tokens that the row's logits predict."""
        turn = row.sequence.turn
        assert turn is not None
        turn.prompt_logprobs.extend(logprobs)
        if len(turn.prompt_logprobs) == turn.prompt_tokens - 1:
            yield PromptScored(turn.ticket, tuple(turn.prompt_logprobs))

    def advance(self, row: Row, sampled: Sampled | None) -> Iterator[Event]:
        """Account for a row that has run all layers; `sampled` is its next token, None while its prompt goes on."""
        sequence = row.sequence
        turn = sequence.turn
        assert turn is not None
        self._scheduler.cache.commit(sequence, row.first + row.length)
        if sampled is not None:
            sequence.tokens.append(sampled.token_id)
            yield Token(turn.ticket, sampled.token_id, sampled.logprobs)
        if not sequence.pending or sampled is not None:
            reason = sequence.finish_reason(self.max_model_len)
            if reason is not None:
                yield self.end(sequence, reason)

    def end(self, sequence: Sequence, reason: FinishReason) -> TurnFinished:
        """End the running turn; the sequence keeps its history and its KV."""
        turn = sequence.turn
        assert turn is not None
        finished = TurnFinished(turn.ticket, reason, sequence.usage(), len(sequence.tokens))
        sequence.last_turn = (turn.ticket, turn.prompt_tokens)
        sequence.turn = None
        self._scheduler.retire(sequence)
        return finished

    def fail(self, sequence: Sequence, error: DjinnError) -> Failed:
        """End the running turn with an error: the history is as before it; the KV may be half written, so it goes."""
        turn = sequence.turn
        assert turn is not None
        sequence.turn = None
        self._tiers.drop(sequence)
        self._tiers.truncate(sequence, turn.kept)
        sequence.tokens.extend(turn.dropped)
        self._scheduler.retire(sequence)
        return Failed(turn.ticket, error)


def sample_request(sequence: Sequence) -> SampleRequest:
    """What the sampler needs to choose the sequence's next token."""
    turn = sequence.turn
    assert turn is not None
    too_short = sequence.generated + 1 < turn.stop.min_tokens
    forbidden = turn.stop.stop_token_ids if too_short else frozenset[int]()
    return SampleRequest(turn.sampling, sequence.tokens, turn.prompt_tokens, forbidden)
