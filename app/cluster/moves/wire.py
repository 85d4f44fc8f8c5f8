"""What two servers say to each other about a session that moves, as MessagePack."""

from __future__ import annotations

import msgspec

from app.cluster.moves.bindings import Binding
from app.domain.errors import DjinnError, Moving, NameTaken, PeerFull, PeerMismatch, PeerStranger
from app.domain.homes import Taken
from app.domain.values import ModelInfo, SessionId
from app.journal.records import SessionRecord

FORMAT = 4
"""Of an offer. One more whenever anything in it, or in a snapshot, changes its meaning."""
PREFIX = "/v1/cluster/"
OFFER, COMMIT, ABORT, SETTLE = (f"{PREFIX}{step}" for step in ("offer", "commit", "abort", "settle"))


class Model(msgspec.Struct, frozen=True):
    """What two servers must have in common before it is worth asking their engines, which know more."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str

    @classmethod
    def of(cls, info: ModelInfo) -> Model:
        """That of a loaded model."""
        return cls(**{name: getattr(info, name) for name in cls.__struct_fields__})


class Offer(msgspec.Struct, frozen=True):
    """A session that is to move, but for its KV: that follows on the same connection."""

    format: int
    token: str
    """Names the move until it is over."""
    source: str
    """The server that it comes from."""
    epoch: int
    model: Model
    record: SessionRecord
    history: bytes
    """Token ids as the journal has them."""
    before: bytes | None
    """The history before the turn that is paused; None: the session is idle."""
    uncounted: int
    returns_at: float | None
    pause_expires_at: float | None
    label: str
    """The `SessionSnapshot`, as a file has it: breakpoints, edits and the paused turn."""
    binding: Binding
    cached_tokens: int = 0
    """Of the paused turn's usage, as the next one."""
    tokens_recomputed: int = 0


class Step(msgspec.Struct, frozen=True):
    """The next step of a move: it is to be taken, or given up. `word` is from the answer to the offer."""

    token: str
    word: str = ""


class Question(msgspec.Struct, frozen=True):
    """Whether the session has been taken with the move of that number. If not, it never will be."""

    session: SessionId
    epoch: int
    seq: int
    journal: str
    """UUID of the journal that the answer is in: another one knows nothing of it."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to all of them but an offer, which is not refused."""

    taken: Taken = Taken.NO
    code: str | None = None
    """Of the error that is why the session was not taken."""
    message: str = ""

    @classmethod
    def refusing(cls, error: DjinnError) -> Answer:
        """An answer that says why not."""
        return cls(code=error.code, message=error.message)

    @property
    def error(self) -> DjinnError | None:
        """Why not, if that is known."""
        return None if self.code is None else refusal(self.code, self.message)


REFUSALS: dict[str, type[DjinnError]] = {
    each.code: each for each in (PeerFull, PeerMismatch, PeerStranger, NameTaken, Moving)
}


def refusal(code: str, message: str) -> DjinnError:
    """The error that another server has refused a session with."""
    return REFUSALS.get(code, PeerMismatch)(message)


def encode(message: Offer | Step | Question | Answer) -> bytes:
    """As it is sent."""
    return msgspec.msgpack.encode(message)
