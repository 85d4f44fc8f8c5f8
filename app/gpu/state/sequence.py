"""A session as the engine sees it: its token history, its KV blocks, and its turn."""

import math
from dataclasses import dataclass, field

from app.domain.breakpoints import Breakpoint
from app.domain.values import Phase, SessionId, Ticket, Tier
from app.gpu.state.activation_map import Cell
from app.gpu.state.blocks import BlockHash, BlockId
from app.gpu.state.checkpoints import CaptureLog, Checkpoint
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.moves import Move
from app.gpu.state.turn import TurnState


@dataclass(slots=True)
class Traffic:
    """Bytes of one session's KV that have crossed the link between device and host; `restores` counts moves in."""

    bytes_out: int = 0
    bytes_in: int = 0
    restores: int = 0


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
    blocks: list[BlockId] = field(default_factory=list)
    """Device blocks: all that `computed` needs, or none."""
    hashes: list[BlockHash] = field(default_factory=list)
    """Chain hashes of the full blocks that have been computed."""
    host_blocks: list[BlockId] = field(default_factory=list)
    """Host copies of the first blocks. A block that is written again loses its copy."""
    disk_blocks: int = 0
    """Blocks in the session's file."""
    disk_tokens: int = 0
    """Tokens of the history, from its beginning, whose KV is in the file."""
    sent: bool = False
    """Whether a client has sent the file: after a restart the engine could not tell what is true of it."""
    computed: int = 0
    reached: int = 0
    plain_to: int = 0
    """Before this position the running turn decodes plainly: no breakpoint, edit or pause concerns its rows, and they
    write to a block that it has to itself. What changes that sets 0; then it is looked at anew.
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
    traffic: Traffic = field(default_factory=Traffic)
    breakpoints: dict[str, Breakpoint] = field(default_factory=dict)
    """By id, in the order they were armed in."""
    interventions: InterventionLog = field(default_factory=InterventionLog)
    """Edits that the positions before `reached`, and those of a paused pass, have been computed with."""
    captures: CaptureLog = field(default_factory=CaptureLog)
    map: tuple[Cell, ...] | None = None
    """What a client is reading of the captures and the checkpoint, as it was when it began to."""
    checkpoint: Checkpoint | None = None
    """Where the turn has paused, until its pass has ended."""
    turn: TurnState | None = None
    """The turn that waits, runs or is paused; None while the session is idle."""
    last_turn: tuple[Ticket, int] | None = None
    """Ticket and prompt length of the turn that ended last, for a `Cancel` that comes just after the end."""

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

    def require_tier(self, tier: Tier) -> None:
        """Raise RuntimeError if the KV is elsewhere."""
        if self.tier is not tier:
            raise RuntimeError(f"session {self.session} is in tier {self.tier}, not {tier}")

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

    def assume_computed(self) -> None:
        """The history comes from elsewhere: all of it had its KV, but for the token that was sampled last. That one has
        had it only if it was edited.
        """
        self.reached = max(0, len(self.tokens) - 1, self.interventions.end)

    @property
    def pending(self) -> int:
        """Tokens of the history that still have to be computed."""
        return len(self.tokens) - self.computed
