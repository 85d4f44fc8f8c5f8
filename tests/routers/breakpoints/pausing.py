"""What the tests of breakpoints share: arming one, a turn that pauses, and reading its checkpoint."""

from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

from tests.routers.generating import GREEDY

LAYERS = 4
HIDDEN = 64
"""Of the tests' model."""

TURN: dict[str, Any] = {**GREEDY, "max_tokens": 6}
CONTEXT = len(TURN["token_ids"])


def open_session(http: httpx.Client, **fields: Any) -> str:
    """The path of a new session."""
    return f"/v1/sessions/{http.post('/v1/sessions', json=fields).raise_for_status().json()['id']}"


def arm(http: httpx.Client, session: str, **fields: Any) -> dict[str, Any]:
    """A new breakpoint, after layer 1 unless told otherwise."""
    where = {} if "layers" in fields else {"layer": 1}
    answer = http.post(f"{session}/breakpoints", json={**where, "action": "pause", **fields})
    assert answer.status_code == 201, answer.text
    armed: dict[str, Any] = answer.json()
    return armed


def generate(http: httpx.Client, session: str, **fields: Any) -> dict[str, Any]:
    turn: dict[str, Any] = http.post(f"{session}/generate", json={**TURN, **fields}).raise_for_status().json()
    return turn


def resume(http: httpx.Client, session: str, **fields: Any) -> dict[str, Any]:
    turn: dict[str, Any] = http.post(f"{session}/resume", json=fields).raise_for_status().json()
    return turn


def pause(http: httpx.Client, session: str, **fields: Any) -> dict[str, Any]:
    """Pause the session's turn in its context; returns the checkpoint."""
    arm(http, session, **fields)
    turn = generate(http, session)
    assert turn["status"] == "paused"
    checkpoint: dict[str, Any] = turn["checkpoint"]
    return checkpoint


def without_age(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What does not change while the session is paused."""
    return {name: value for name, value in checkpoint.items() if name != "age_s"}


def read(http: httpx.Client, session: str, positions: str = "all") -> NDArray[np.float32]:
    """The residual stream of a paused session."""
    answer = http.get(f"{session}/checkpoint/activation", params={"positions": positions}).raise_for_status()
    found: NDArray[np.float32] = load(answer.content)["activation"]
    return found


def write(http: httpx.Client, session: str, content: bytes) -> httpx.Response:
    return http.put(f"{session}/checkpoint/activation", content=content)


def edit(http: httpx.Client, session: str, *edits: dict[str, Any]) -> httpx.Response:
    return http.post(f"{session}/checkpoint/edit", json={"edits": edits})
