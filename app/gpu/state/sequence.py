"""A session as the engine sees it: its token history, its KV blocks, and the turn that waits, runs or is paused.

The checkpoints and captures of all sessions share one room in host memory.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from app.domain.activations import ResumeCost
from app.domain.breakpoints import Breakpoint, Intervention
from app.domain.errors import ActivationsFull
from app.domain.memory_map import StackUse
from app.domain.points import Point
from app.domain.values import (
    FinishReason,
    Phase,
    SamplingParams,
    SessionId,
    StopRule,
    Ticket,
    Tier,
    TokenLogprobs,
    TurnUsage,
)
from app.gpu.state.blocks import BlockHash, BlockId, BlockPool
from app.gpu.state.checkpoints import Captured, CaptureLog, CellMap, Checkpoint
from app.gpu.state.drafts import Drafter
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.layer_state import ONE_GROUP, Groups
from app.gpu.state.moves import Move
from app.grammars.matcher import Matcher
from app.machine.budget import Budget
from app.machine.files import size

Seen = tuple["array[int]", "array[int]"]
"""The tokens of a history, each once, and how often each was generated."""


class TokenCounts:
    """Which tokens a turn's history has, for penalties. The history only grows: each step counts what is new in it."""

    def __init__(self, prompt_tokens: int) -> None:
        """Tokens from position `prompt_tokens` on are generated."""
        self._prompt_tokens = prompt_tokens
        self._places = dict[int, int]()
        self._tokens, self._generated = array("q"), array("q")
        self._counted = 0

    def seen(self, history: Sequence[int], drafted: Sequence[int] = ()) -> Seen:
        """What the history has, as if the `drafted` tokens had been generated after it."""
        for position, token in enumerate(history[self._counted :], self._counted):
            place = self._places.setdefault(token, len(self._tokens))
            if place == len(self._tokens):
                self._tokens.append(token)
                self._generated.append(0)
            self._generated[place] += position >= self._prompt_tokens
        self._counted = len(history)
        tokens, generated, new = self._tokens[:], self._generated[:], dict[int, int]()
        for token in drafted:
            place = self._places[token] if token in self._places else new.setdefault(token, len(tokens))
            if place == len(tokens):
                tokens.append(token)
                generated.append(0)
            generated[place] += 1
        return tokens, generated


@dataclass(slots=True)
class TurnState:
    """One turn in the engine. `prompt_tokens` is the history's length when the turn began."""

    ticket: Ticket
    sampling: SamplingParams
    stop: StopRule
    prompt_tokens: int
    kept: int
    """Tokens of the history that the turn began from."""
    dropped: tuple[int, ...] = ()
    """Tokens that came after those, which come back if the turn fails, as do the next two."""
    interventions: tuple[Intervention, ...] = ()
    """Those of the session when the turn began."""
    reached: int = 0
    """The session's when the turn began."""
    matcher: Matcher | None = None
    """Where the generated tokens are in the grammar, if the turn has one."""
    drafter: Drafter | None = None
    """Guesses the next tokens, once it has been asked to."""
    counts: TokenCounts | None = None
    """Of the history, once a penalty has looked at them."""
    pausable: bool = True
    paused: bool = False
    pause_at: tuple[int, Point, int, str | None] | None = None
    """A boundary and a point of it, the position in whose pass to pause there, and the breakpoint that asks for it."""
    to_end: bool = False
    """Whether breakpoints that pause are passed."""
    halted: int | None = None
    """Where the row began that is run again, to pause at a probe."""
    resumed: ResumeCost | None = None
    """Cost of the last resume, until the client has been told."""
    announced: bool = False
    """Whether a `Started` has been sent since the turn last entered the queue."""
    cached_tokens: int | None = None
    """None until the turn has left the queue for the first time."""
    prefix_hashes: list[BlockHash] = field(default_factory=list)
    """Chain hashes of the history's first blocks without edits, as far as the turn has looked for them."""
    prefix_ends: Sequence[int] = ()
    """Lengths, rising, of prefixes that other sessions share or may. Where layers fold, a state is kept at each."""
    near_ends: Sequence[int] = ()
    """Lengths near the history's end, where another one may diverge from it: a state is kept at each of these too."""
    expected: tuple[tuple[object, ...], InterventionLog, int] | None = None
    """What `expected_edits` has found, and what that is based on: while the turn waits, each step needs it."""
    awaits_prefill: bool = False
    """Whether it waits for another server to compute its prompt. It has its place in the queue, and nothing more."""
    coming: Move | None = None
    """What brings the KV of that."""
    skipped: int = 0
    """Steps that computed prompts of others instead of its own."""
    slice_began: int = 0
    """The step in which the turn last began to run, of those that have been planned."""
    slice_reached: int = 0
    """How far the session had come then."""
    tokens_recomputed: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    begun_at: float = 0.0
    """On the engine's clock."""
    restore_ms: float = 0.0
    """How long the turn has waited for KV that was not on the device."""

    @property
    def scores_prompt(self) -> bool:
        """Whether it still needs logits of prompt tokens, which only computing them gives."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_tokens - 1

    def fork(self, ticket: Ticket) -> Self:
        """The same turn for another session."""
        return replace(
            self,
            ticket=ticket,
            matcher=None if self.matcher is None else self.matcher.copy(),
            drafter=None,
            counts=None,
            prompt_logprobs=list(self.prompt_logprobs),
            prefix_hashes=list(self.prefix_hashes),
            expected=None,
            restore_ms=0.0,  # the copy has waited for nothing
        )

    def generated(self, history_tokens: int) -> int:
        """Tokens generated so far, given the history's length."""
        return history_tokens - self.prompt_tokens

    def usage(self, history_tokens: int) -> TurnUsage:
        """What the turn has cost so far, given the history's length."""
        return TurnUsage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=self.generated(history_tokens),
            tokens_recomputed=self.tokens_recomputed,
        )

    def is_full(self, history_tokens: int, max_model_len: int) -> bool:
        """Whether the turn has all the tokens that it may have, once the history has so many."""
        return self.generated(history_tokens) >= self.stop.max_tokens or history_tokens >= max_model_len

    def finish_reason(self, history: Sequence[int], max_model_len: int) -> FinishReason | None:
        """Why the turn must end now, judged after each token of `history`; None while it may go on."""
        length, stop = len(history), self.stop
        generated = length - self.prompt_tokens
        if generated > 0 and history[-1] in stop.stop_token_ids and generated >= stop.min_tokens:
            return FinishReason.STOP
        if self.matcher is not None and self.matcher.ended:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.is_full(length, max_model_len) else None


@dataclass(slots=True, eq=False)
class TokenSequence:
    """Token history and KV of one session.

    The history is the truth and the KV a cache of it: the first `computed` tokens have their KV in `tier`, and losing
    it costs only time. `reached` is the largest `computed` has been since the history was last cut, so the difference
    is work done twice.
    """

    session: SessionId
    namespace: BlockHash
    guaranteed: bool = False
    """Its KV never gives way to others."""
    tokens: list[int] = field(default_factory=list)
    tenant: str = ""
    """Whose it is; all sessions of a server without keys are of one."""
    adapter: str = ""
    """The digest of the LoRA adapter that it is computed with, which its `namespace` covers; empty: none."""
    blocks: list[BlockId] = field(default_factory=list)
    """Device blocks, stripe by stripe: all that `computed` needs, or none. Those of a state come last."""
    hashes: list[BlockHash] = field(default_factory=list)
    """Chain hashes of the full stripes that have been computed."""
    host_blocks: list[BlockId] = field(default_factory=list)
    """Host copies of the first blocks. A block that is written again loses its copy."""
    behind: int = 0
    """So many first blocks lie behind the window: those of them that have one are seen by no later token and not held.
    In their place the two lists above name some that are.
    """
    groups: Groups = ONE_GROUP
    """Of the model, once some blocks lie behind a window."""
    marks: list[int] = field(default_factory=list)
    """Rising numbers of tokens whose state has been kept, where layers fold. It may be gone by now."""
    disk_blocks: int = 0
    """Blocks in the session's file."""
    disk_behind: int = 0
    """So many first blocks lie behind the window, of which the file has those without one."""
    disk_tokens: int = 0
    """Tokens of the history, from its beginning, whose KV is in the file, but for those blocks."""
    sent: bool = False
    """Whether a client has sent the file: after a restart the engine could not tell what is true of it."""
    computed: int = 0
    reached: int = 0
    fast_path_until: int = 0
    """Before this position the running turn is on the fast path: its rows are one token each, no breakpoint, edit or
    pause concerns them, and they write to a block that no other session holds. What changes that sets 0.
    """
    moving: Tier | None = None
    """Where the KV is moving to: `to_host`, `to_disk` or `to_device`."""
    outgoing: Move | None = None
    """Copies to the host that are under way; they count when they have arrived, whatever `moving` is by then."""
    incoming: Move | None = None
    """Copies to the device, or from disk, that are under way."""
    saving: Move | None = None
    """The last write of the session's file, while it is under way."""
    phase: Phase = Phase.COMPUTE
    resume_at: float | None = None
    """When the client will be back, by its own word, on the engine's clock."""
    waits: bool = False
    """Whether the client has ever said that the session waits; one that never does is not copied ahead of need."""
    bytes_out: int = 0
    """Of its KV, that have crossed the link from the device to the host."""
    bytes_in: int = 0
    """The same the other way, in so many `restores`."""
    restores: int = 0
    breakpoints: dict[str, Breakpoint] = field(default_factory=dict)
    """By id, in the order they were armed in."""
    interventions: InterventionLog = field(default_factory=InterventionLog)
    """Edits that the positions before `reached`, and those of a paused pass, have been computed with."""
    captures: CaptureLog = field(default_factory=CaptureLog)
    map: CellMap | None = None
    """What a client is reading of the captures and the checkpoint, as it was when it began to."""
    checkpoint: Checkpoint | None = None
    """Where the turn has paused, until its pass has ended."""
    turn: TurnState | None = None
    """The turn that waits, runs or is paused; None while the session is idle."""
    last_turn: tuple[Ticket, int] | None = None
    """Ticket and prompt length of the turn that ended last, for a `Cancel` that comes just after the end."""
    closed: bool = False
    """Moves of its KV may still end, when another session may have its id already."""

    @property
    def tier(self) -> Tier | None:
        """Where the KV is, or is moving to; None if there is none."""
        if self.moving is not None:
            return self.moving
        if self.blocks:
            return Tier.DEVICE
        if self.host_blocks:
            return Tier.HOST
        return Tier.DISK if self.computed else None

    @property
    def held(self) -> list[BlockId]:
        """The device blocks that the session holds."""
        return self.groups.held(self.blocks, self.behind) if self.behind else self.blocks

    @property
    def held_count(self) -> int:
        """How many those are."""
        return self.groups.count_held(len(self.blocks), self.behind) if self.behind else len(self.blocks)

    @property
    def copies(self) -> list[BlockId]:
        """The host blocks that it holds."""
        return self.groups.held(self.host_blocks, self.behind)

    @property
    def copy_count(self) -> int:
        """How many of these there are."""
        return self.groups.count_held(len(self.host_blocks), self.behind)

    @property
    def first_held(self) -> int:
        """Index of the first stripe of which it holds blocks."""
        return 0 if self.groups.full else self.behind

    @property
    def copied(self) -> int:
        """Index of the first stripe on the device that needs copies and has none."""
        return max(self.first_held, len(self.host_blocks))

    @property
    def uncopied(self) -> int:
        """How many blocks on the device have no copy."""
        return self.uncopied_before(len(self.blocks))

    def uncopied_before(self, end: int) -> int:
        """The same of its first `end` blocks."""
        first, behind, count = self.copied, self.behind, self.groups.count_held
        if first >= behind:
            return max(0, end - first)
        return max(0, count(end, behind) - count(first, behind))

    def growth(self, pool: BlockPool, tokens: int) -> int:
        """The most device blocks that it still needs until so many tokens are computed."""
        missing = pool.blocks_for(tokens) - len(self.blocks)
        if missing > 0 and pool.groups.windowed:
            missing = min(missing, pool.most_for(tokens) - self.held_count)
        return max(0, missing)

    @property
    def return_time(self) -> float:
        """When the client will be back on the engine's clock, as far as it has said so."""
        return math.inf if self.resume_at is None else self.resume_at

    @property
    def busy(self) -> bool:
        """Whether a turn waits or runs; one that is paused does neither."""
        return self.turn is not None and not self.turn.paused

    @property
    def watched(self) -> bool:
        """Whether anything may happen to the session's rows on their way up the layers."""
        stepping = self.turn is not None and self.turn.pause_at is not None
        return bool(self.breakpoints or self.interventions or self.checkpoint or stepping)

    @property
    def paused_pass(self) -> Checkpoint | None:
        """The paused pass that the next row goes on with; None if the next row begins a pass."""
        checkpoint = self.checkpoint
        return checkpoint if checkpoint is not None and self.computed == checkpoint.first else None

    @property
    def written(self) -> int:
        """Positions with KV in the blocks: the computed ones, and those of a paused pass, up to its boundary."""
        paused = self.paused_pass
        return paused.end if paused is not None and paused.held else self.computed

    @property
    def prompt_tokens(self) -> int:
        """Length of the context that the turn began from, or would if it began now."""
        return len(self.tokens) if self.turn is None else self.turn.prompt_tokens

    @property
    def active_turn(self) -> TurnState:
        """The turn of a sequence that has one."""
        assert self.turn is not None
        return self.turn

    def blocks_to_come(self, pool: BlockPool) -> int:
        """Device blocks that the rest of its tokens and one more need."""
        return self.growth(pool, len(self.tokens) + 1)

    def assume_computed(self) -> None:
        """The history comes from elsewhere: all of it had its KV, but for the token that was sampled last. That one has
        had it only if it was edited.
        """
        self.reached = max(0, len(self.tokens) - 1, self.interventions.end)

    @property
    def pending(self) -> int:
        """Tokens of the history that still have to be computed."""
        return len(self.tokens) - self.computed


class ActivationRoom:
    """Counts what each session holds of `max_bytes`. Each change of a session's checkpoint or captures calls `note`.

    Tenants share them as those of a `Budget`, where each checkpoint and capture is a thing. Without tenants none leaves
    room to others.
    """

    def __init__(self, max_bytes: int) -> None:
        def refuse(taken: int, own: int, needed: int) -> ActivationsFull:
            whose = f", {size(own)} of it of this tenant, who leaves others as much" if own else ""
            return ActivationsFull(
                f"checkpoints and captures take {size(taken)} of the {size(max_bytes)} of max_activation_bytes{whose}; "
                f"this checkpoint needs {size(needed)}: end paused turns, or delete captures",
                retry_after_s=1,
            )

        self._budget = Budget(max_bytes, refuse)
        self._held: dict[SessionId, tuple[int, int]] = {}
        """Bytes of the checkpoint and of captures, of each session that has some; forks count the whole of what they
        share.
        """

    def check(self, sequence: TokenSequence, checkpoint_bytes: int, *, besides: bool = False) -> None:
        """Raise `ActivationsFull` unless the session may have a checkpoint of so many bytes in place of its own, or
        `besides` it its tenant may.
        """
        held = 0 if besides else self._held.get(sequence.session, (0, 0))[0]
        if checkpoint_bytes > held:
            self._budget.require(sequence.tenant or None, checkpoint_bytes - held, held)

    def capture(self, sequence: TokenSequence, captured: Captured) -> None:
        """Keep one more capture of the session, or count it as dropped if there is no room."""
        try:
            self._budget.require(sequence.tenant or None, captured.hidden.nbytes)
        except ActivationsFull:
            sequence.captures.dropped += 1
        else:
            sequence.captures.add(captured)
            self.note(sequence)

    def note(self, sequence: TokenSequence) -> None:
        """Account for what the session holds now."""
        checkpoint = sequence.checkpoint
        self._set(sequence, 0 if checkpoint is None else checkpoint.nbytes, sequence.captures.nbytes)

    def forget(self, sequence: TokenSequence) -> None:
        """The session is closed: it holds nothing."""
        self._set(sequence, 0, 0)

    def use(self) -> StackUse:
        """What is held now."""
        checkpoints = [nbytes for nbytes, _ in self._held.values() if nbytes]
        captures = {session: nbytes for session, (_, nbytes) in self._held.items() if nbytes}
        return StackUse(len(checkpoints), sum(checkpoints), sum(captures.values()), captures)

    def _set(self, sequence: TokenSequence, checkpoint: int, captures: int) -> None:
        before = sum(self._held.pop(sequence.session, (0, 0)))
        if checkpoint or captures:
            self._held[sequence.session] = checkpoint, captures
        self._budget.give(sequence.tenant or None, before - checkpoint - captures)
