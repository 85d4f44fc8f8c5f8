"""What two servers say to each other about a session that moves, as MessagePack."""

from __future__ import annotations

import msgspec

from app.cluster.moves.bindings import Binding
from app.domain.errors import DjinnError, Moving, NameTaken, PeerFull, PeerMismatch, PeerStranger
from app.domain.homes import Taken
from app.domain.values import ModelInfo, SessionId
from app.journal.records import SessionRecord

FORMAT = 4
"""The version of `Offer`, raised whenever the meaning of anything in it or in a snapshot changes."""
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
        """What a loaded model has."""
        return cls(**{name: getattr(info, name) for name in cls.__struct_fields__})


class Offer(msgspec.Struct, frozen=True):
    """A session that is to move, without its KV, which follows on the same connection."""

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
    """Asks whether the session was taken with the move of that number. If not, it never will be."""

    session: SessionId
    epoch: int
    seq: int
    journal: str
    """UUID of the journal that the answer is in: another one knows nothing of it."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to a step, a question, or an offer that is refused."""

    taken: Taken = Taken.NO
    code: str | None = None
    """The code of the error for which the session was not taken."""
    message: str = ""

    @classmethod
    def refusing(cls, error: DjinnError) -> Answer:
        """An answer with the code and the message of that error."""
        return cls(code=error.code, message=error.message)

    @property
    def error(self) -> DjinnError | None:
        """The error for which the session was not taken, if that is known."""
        return None if self.code is None else REFUSALS.get(self.code, PeerMismatch)(self.message)


REFUSALS: dict[str, type[DjinnError]] = {
    each.code: each for each in (PeerFull, PeerMismatch, PeerStranger, NameTaken, Moving)
}
"""What another server refuses a session with."""


def encode(message: Offer | Step | Question | Answer) -> bytes:
    """The message as MessagePack."""
    return msgspec.msgpack.encode(message)
