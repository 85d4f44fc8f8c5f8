"""Orders to move KV between tiers, as data: the planner makes them, a mover carries them out and reports back."""

from dataclasses import dataclass
from enum import StrEnum

from app.domain.values import SessionId
from app.gpu.state.blocks import BlockHash, BlockId


class MoveKind(StrEnum):
    """What a mover does with the blocks of a move; the blocks' own tiers follow from it."""

    OUT = "out"
    """Device blocks to host blocks."""
    IN = "in"
    """Host blocks to device blocks."""
    TO_DISK = "to_disk"
    """Host blocks to the session's file."""
    FROM_DISK = "from_disk"
    """The session's file to host blocks."""
    EXPORT = "export"
    """Host blocks to the file `path`."""
    IMPORT = "import"
    """The file `path`, checked, becomes the session's."""
    SEND = "send"
    """Host blocks to another server's engine."""
    RECEIVE = "receive"
    """From another server's engine to host blocks, or to the session's file."""
    SEND_PROMPT = "send_prompt"
    """Host blocks, a part of a prompt that this server computes for another one, to that one's engine."""
    RECEIVE_PROMPT = "receive_prompt"
    """From the engine of a server that computes a prompt for this one to host blocks."""
    DELETE = "delete"
    """The session's file goes."""


@dataclass(frozen=True, slots=True)
class HalfPass:
    """The last `blocks` blocks of a move have KV only of a paused pass, which has run `layers` layers. The layers above
    are not copied: they mean nothing until the pass goes on, and then it writes to them before anybody reads them.
    They have `left_out` bytes.
    """

    blocks: int = 0
    layers: int = 0
    left_out: int = 0


WHOLE_PASSES = HalfPass()


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """One order: block `source[i]` of one tier is copied to block `target[i]` of the other.

    It holds a reference to each of its blocks until it has completed. They are those that a sequence holds with so many
    `behind` its window, from index `first` on. `hashes` are those of the full ones. `token_ids` is the history that a
    file is written with, and the first `computed` tokens are those whose KV the blocks hold (for a move out also those
    of a paused pass).
    """

    number: int
    kind: MoveKind
    session: SessionId
    source: tuple[BlockId, ...] = ()
    target: tuple[BlockId, ...] = ()
    blocks: tuple[BlockId, ...] = ()
    """For a move in: all device blocks that the session will hold; those that are not in `target` were there already.
    """
    first: int = 0
    behind: int = 0
    hashes: tuple[BlockHash, ...] = ()
    half: HalfPass = WHOLE_PASSES
    token_ids: tuple[int, ...] = ()
    computed: int = 0
    early: bool = False
    """No turn waits for it."""
    path: str = ""
    about: str = ""
    max_tokens: int = 0
    """Most that a file which is imported may have."""
    namespace: BlockHash = b""
    adapter: str = ""
    """The digest of the one that the session is computed with."""
    connection: int = 0
    """The number of the one to the other server."""
    begins: bool = False
    """Whether nothing has been sent over it."""
    ends: bool = False
    """Whether nothing more is sent over it."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A mover's report: the move has ended after `seconds` of copying; `error` says why nothing of it may be used, and
    `disk_is_full` whether it is that, `is_mismatch` whether it is of another model.

    `token_ids`, `computed` and `adapter` are what an imported file holds, and `about_bytes` from `about_at` on what it
    says. `computed` is also what another server has sent, of a prompt even if there is an `error`, and `sent_bytes`
    what has been sent to one. A file or a server had those blocks that are held with so many `behind` the window.
    `arrived` is the share of a move's bytes that have: the others come to the device behind them.
    """

    number: int
    seconds: float = 0.0
    error: str | None = None
    disk_is_full: bool = False
    is_mismatch: bool = False
    token_ids: tuple[int, ...] = ()
    computed: int = 0
    behind: int = 0
    about_at: int = 0
    about_bytes: int = 0
    adapter: str = ""
    sent_bytes: int = 0
    arrived: float = 1.0
