"""The life of a turn: it begins with a `Submit`, advances by computed rows, may pause and go on, and ends once."""

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from app.domain.breakpoints import Gate, Pass, Probe, Then, TopFeatures
from app.domain.errors import ActivationsFull, DjinnError, FieldOutOfRange, GrammarTooComplex
from app.domain.points import Point, boundary_of
from app.domain.values import FinishReason, Grammar, TokenLogprobs
from app.gpu.planning.scheduler import Scheduler
from app.gpu.sampling import Sampled, SampleRequest, penalise
from app.gpu.state.checkpoints import Captured, Checkpoint, StoredTensor
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.segments import Row
from app.gpu.state.sequence import ActivationRoom, Seen, TokenCounts, TokenSequence, TurnState
from app.grammars.matcher import Matcher
from app.messages import Event, Failed, Featured, Paused, Probed, PromptScored, Spent, Submit, Token, TurnFinished

_NONE = frozenset[int]()
Match = Callable[[Grammar, Sequence[int]], Matcher]
"""A matcher of a grammar, after tokens that have been generated. Raises `FieldOutOfRange` if they do not match."""


class Turns:
    """Changes sequences as their turns begin, advance, pause and end, and tells of it in events."""

    def __init__(self, scheduler: Scheduler, max_model_len: int, match: Match, activations: ActivationRoom) -> None:
        self._scheduler = scheduler
        self._tiers = scheduler.placement.tiers
        self.max_model_len = max_model_len
        self._match = match
        self.activations = activations

    def begin(self, sequence: TokenSequence, command: Submit, keep: int, above: Checkpoint | None = None) -> None:
        """Start a turn whose context is the first `keep` tokens of the history and then the command's own from there
        on. With `above` its pass begins there. Raises `FieldOutOfRange` for a grammar that is invalid.
        """
        grammar = command.sampling.grammar
        matcher = None if grammar is None else self._match(grammar, ())
        before = tuple(sequence.tokens[keep:]), sequence.interventions.snapshot(), sequence.reached
        self._tiers.truncate(sequence, keep)
        sequence.tokens.extend(command.token_ids[keep:] if command.replace else command.token_ids)
        context = len(sequence.tokens)
        sequence.turn = TurnState(
            command.ticket, command.sampling, command.stop, context, keep, *before, matcher, pausable=command.pausable
        )
        self._tiers.cache.note_prefix_ends(sequence, command.prefix_ends)
        if command.sampling.prompt_logprobs is not None:
            self._tiers.cut(sequence, 0)  # only computing the prompt gives its log-probabilities
        self._scheduler.enqueue(sequence, above)
        if above is not None:
            self.activations.note(sequence)

    def score(self, row: Row, logprobs: Sequence[TokenLogprobs]) -> Iterator[Event]:
        """Take the log-probabilities of the prompt tokens that the row's logits predict."""
        turn = row.turn
        turn.prompt_logprobs.extend(logprobs)
        if len(turn.prompt_logprobs) == turn.prompt_tokens - 1:
            yield PromptScored(turn.ticket, tuple(turn.prompt_logprobs))

    def read(self, row: Row, found: Captured, *, stopped: bool) -> tuple[list[Event], bool]:
        """What has been read in a row, and whether the turn stops or pauses for it. Nothing, if it was told before: the
        row has been run again, to pause, when it has `stopped`.
        """
        turn, reads = row.turn, found.reads
        if stopped and turn.halted == row.first:
            return [], False
        values = array("f", found.hidden.read(0, len(found.positions)).data)
        may_pause = turn.pausable and not turn.to_end
        match reads:
            case Probe():
                ends = reads.then is not None and (reads.then is Then.STOP or may_pause)
                halts = ends and reads.above is not None and any(value > reads.above for value in values)
                return [Probed(turn.ticket, reads.name, found.positions, tuple(values), halts)], halts
            case TopFeatures(top_k=count):
                rows = (values[first : first + 2 * count] for first in range(0, len(values), 2 * count))
                top = tuple(
                    tuple((int(i), value) for value, i in zip(row[:count], row[count:], strict=True) if value > 0)
                    for row in rows
                )
                return [Featured(turn.ticket, reads.name, found.positions, top)], False
            case _:
                return [], may_pause and any(values)

    def capture(self, row: Row, found: Captured) -> list[Event]:
        """Keep what has been captured in a row, where its gate held. A breakpoint that acts once has done so then."""
        kept, sequence = found.where_it_holds(), row.sequence
        if kept is None:
            return []
        self.activations.capture(sequence, kept)
        armed = sequence.breakpoints.get(found.breakpoint)
        if armed is None or armed.gate is None or not armed.once:
            return []
        del sequence.breakpoints[armed.id]
        return [Spent(sequence.session, armed.id)]

    def halt(self, row: Row, found: Captured, *, stopped: bool) -> list[Event] | None:
        """Stop the turn of a row, or have it run again up to where that was found, to pause there: what it has written
        of KV is written again. None: it has `stopped` already, at a breakpoint, which does.
        """
        sequence, turn = row.sequence, row.turn
        if pauses_at(found):
            if stopped:
                return None
            boundary = boundary_of(found.point, found.layer)
            turn.pause_at, turn.halted = (boundary, found.point, row.first, found.breakpoint), row.first
            self._scheduler.cache.run_again(sequence)
            return []
        events = [] if stopped else self.advance(row, ())
        if sequence.turn is turn:
            events.append(self.end(sequence, FinishReason.PROBE))
        return events

    def advance(self, row: Row, sampled: Sequence[Sampled]) -> list[Event]:
        """Account for a row that has run all layers. `sampled` is its next token, and those after its drafted tokens;
        empty while its prompt goes on. A drafted token counts if it was chosen, and the one after it with it.
        """
        sequence, turn, cache = row.sequence, row.turn, self._scheduler.cache
        if row.path.new_edits:
            try:
                _note_edits(row)
            except FieldOutOfRange as error:
                return [self.fail(sequence, error)]
        events: list[Event] = self._spend(row) if row.path.spent else []
        if sequence.checkpoint is not None and (resumed := sequence.paused_pass) is not None:
            turn.resumed = resumed.cost()
            sequence.checkpoint = None
            self.activations.note(sequence)
        cache.commit(sequence, row.first + row.length - len(row.draft))
        tokens, limit = sequence.tokens, self.max_model_len
        if not (sampled or sequence.pending) and (reason := turn.finish_reason(tokens, limit)) is not None:
            events.append(self._end_complete(sequence, reason))
        accepted, last = 0, len(sampled) - 1
        for number, chosen in enumerate(sampled):
            tokens.append(chosen.token_id)
            events.append(Token(turn.ticket, chosen.token_id, chosen.logprobs))
            if turn.matcher is not None and not turn.matcher.consume((chosen.token_id,)):
                events.append(self.fail(sequence, _grammar_error(turn, turn.generated(len(tokens)))))
            elif (reason := turn.finish_reason(tokens, limit)) is not None:
                events.append(self._end_complete(sequence, reason))
            if number == last or sequence.turn is not turn or row.draft[number].token_id != chosen.token_id:
                break
            turn.matcher, accepted = row.draft[number].matcher, accepted + 1
            cache.take_drafted(sequence, accepted)
        if row.draft:
            cache.trim(sequence, sequence.computed)
            self._scheduler.drafting.note_accepted(len(sampled) - 1, accepted)
        return events

    def _end_complete(self, sequence: TokenSequence, reason: FinishReason) -> TurnFinished:
        self._scheduler.cache.trim(sequence, sequence.computed)
        return self.end(sequence, reason)

    def pause(
        self, row: Row, hidden: StoredTensor, base: StoredTensor | None, states: StoredTensor | None
    ) -> list[Event]:
        """Stop the turn where its row has stopped, with what it had there, the residual stream below the layer if that
        is inside of one, and the states that layers below have left. The turn fails if there is no room for that.
        """
        sequence, turn, path = row.sequence, row.turn, row.path
        assert path.pauses is not None
        checkpoint = Checkpoint(
            boundary=path.hi if path.pauses is Point.RESID_POST else path.hi - 1,
            first=row.first,
            length=row.length,
            hidden=hidden,
            in_pass=Pass.PREFILL if row.first < turn.prompt_tokens else Pass.DECODE,
            breakpoint=path.breakpoint,
            created_at=time.time(),
            point=path.pauses,
            base=base,
            states=states,
        )
        try:
            _note_edits(row)
            self.activations.check(sequence, checkpoint.nbytes)
        except (FieldOutOfRange, ActivationsFull) as error:
            return [self.fail(sequence, error)]
        events: list[Event] = self._spend(row)
        resumed = None if sequence.checkpoint is None else sequence.checkpoint.cost()
        sequence.checkpoint = checkpoint
        self.activations.note(sequence)
        turn.paused, turn.pause_at, turn.announced, turn.drafter = True, None, False, None
        self._scheduler.retire(sequence)
        usage = turn.usage(len(sequence.tokens))
        events.append(Paused(turn.ticket, checkpoint.info(), usage, resumed or turn.resumed))
        turn.resumed = None
        return events

    def end(self, sequence: TokenSequence, reason: FinishReason) -> TurnFinished:
        """End the sequence's turn; the sequence keeps its history and the KV of whole passes."""
        turn = sequence.active_turn
        self._drop_checkpoint(sequence)
        made = sequence.interventions.snapshot()
        changed = None if made == turn.interventions else made
        length = len(sequence.tokens)
        finished = TurnFinished(turn.ticket, reason, turn.usage(length), length, changed, turn.resumed)
        sequence.last_turn = (turn.ticket, turn.prompt_tokens)
        self._scheduler.cache.keep_state(sequence)
        sequence.turn = None
        self._scheduler.retire(sequence)
        return finished

    def fail(self, sequence: TokenSequence, error: DjinnError) -> Failed:
        """End the sequence's turn with an error. The history is as before it; the KV goes: it may be half written."""
        turn = sequence.active_turn
        self._drop_checkpoint(sequence)
        sequence.turn = None
        self._tiers.drop(sequence)
        self._tiers.truncate(sequence, turn.kept)
        sequence.tokens.extend(turn.dropped)
        sequence.interventions = InterventionLog(turn.interventions)
        sequence.reached = turn.reached
        self._scheduler.retire(sequence)
        return Failed(turn.ticket, error)

    def _spend(self, row: Row) -> list[Event]:
        """Note which breakpoints are spent in the row."""
        armed, session = row.sequence.breakpoints, row.sequence.session
        return [Spent(session, spent) for spent in row.path.spent if armed.pop(spent, None) is not None]

    def _drop_checkpoint(self, sequence: TokenSequence) -> None:
        """Free the checkpoint, and the KV of its pass, which will not go on."""
        self._tiers.forget_half_pass(sequence)
        sequence.checkpoint = None
        self.activations.note(sequence)
        sequence.interventions.truncate(max(sequence.reached, sequence.computed))


def pauses_at(found: Captured) -> bool:
    """Whether a turn that halts for what was found pauses there, rather than stops."""
    return isinstance(found.reads, Gate) or (isinstance(found.reads, Probe) and found.reads.then is Then.PAUSE)


def _grammar_error(turn: TurnState, number: int) -> GrammarTooComplex:
    """The turn's matcher has given up at that token of the answer."""
    grammar, matcher = turn.sampling.grammar, turn.matcher
    assert grammar is not None
    assert matcher is not None
    what = f"{grammar.field}: the grammar became too complex at token {number} of the answer: {matcher.error}"
    return GrammarTooComplex(what, param=grammar.field)


def _note_edits(row: Row) -> None:
    """Note the edits that breakpoints have made in the row. Raises `FieldOutOfRange` if they are too many."""
    log = row.sequence.interventions
    if not row.path.new_edits:  # a journal of an earlier version may have more than are taken today
        return
    for made in row.path.new_edits:
        log.add(made)
    log.check("breakpoints")
    if row.sequence.paused_pass is not None:  # another has no more edits than its breakpoints make
        log.check_pass("breakpoints", row.first, row.end)


def sample_requests(rows: Iterable[Row]) -> list[SampleRequest]:
    """What the sampler needs to make the choices of the rows, in their order: each as if the drafted tokens before it
    had been chosen.
    """
    requests = list[SampleRequest]()
    for row in rows:
        if not row.samples:
            continue
        turn, draft = row.turn, row.draft
        params, stop, matcher = turn.sampling, turn.stop, turn.matcher
        position, penalises = row.first + row.length - len(draft), penalise(params)
        least = turn.prompt_tokens + stop.min_tokens
        for number in range(1 + len(draft)):
            if number:
                matcher, position = draft[number - 1].matcher, position + 1
            forbidden = stop.stop_token_ids if position + 1 < least else _NONE
            seen = _seen(row, number) if penalises else None
            requests.append(SampleRequest(params, forbidden, position, matcher, seen))
    return requests


def _seen(row: Row, drafted: int) -> Seen:
    """The tokens of the history and the first `drafted` of the row's draft."""
    turn = row.turn
    turn.counts = turn.counts or TokenCounts(turn.prompt_tokens)
    return turn.counts.seen(row.sequence.tokens, [each.token_id for each in row.draft[:drafted]])
