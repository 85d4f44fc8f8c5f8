"""What a server says to another one that is to compute a prompt for it, as MessagePack."""

from __future__ import annotations

import msgspec

from app.cluster.moves.wire import PREFIX, Model
from app.domain.values import PrefillTransport

FORMAT = 2
"""Of a prompt that is offered. One more whenever anything in it changes its meaning."""
PROMPT = f"{PREFIX}prompt"


class Form(msgspec.Struct, frozen=True):
    """What both servers must have alike."""

    model: Model
    block_size: int
    transport: PrefillTransport


class PromptOffer(msgspec.Struct, frozen=True):
    """A prompt whose KV is to come over the connection. Closing the connection cancels it."""

    format: int
    source: str
    """The server that asks."""
    form: Form
    tenant: str
    namespace: str | None
    """Of the session, if it is not the tenant's: only then may others find what has been computed for it."""
    token_ids: bytes
    """Of the whole prompt, as the journal has them."""
    first: int
    """The number of the first block that is to come."""


def encode_prompt(offer: PromptOffer) -> bytes:
    """As it is sent."""
    return msgspec.msgpack.encode(offer)
