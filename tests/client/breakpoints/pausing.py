"""What the tests of breakpoints share: a prompt, and a session that is paused over it."""

from __future__ import annotations

from typing import Any

import client
from client import Djinn
from client.calls import TurnOptions

PROMPT = list(range(5, 25))
GREEDY: TurnOptions = {"token_ids": PROMPT, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def paused(djinn: Djinn, layer: int = 1, **options: Any) -> client.Session:
    """A session that is paused after a layer, over its prompt."""
    session = djinn.sessions.create()
    session.break_at(layer=layer, **options)
    assert session.generate(**GREEDY).status == "paused"
    return session
