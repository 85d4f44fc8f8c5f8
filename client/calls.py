"""Every route as a value: what to send and how to read the answer. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

from client.answer import Listing
from client.memory_models import MemoryMap
from client.models import (
    Health,
    History,
    Model,
    Phase,
    PhaseChange,
    Residency,
    SessionInfo,
    SessionPage,
    SessionState,
    Tier,
    Turn,
)

T = TypeVar("T")

PAGE_SIZE = 100
"""The most that the server gives at once."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and `parse`, which reads the body of its answer and raises `ValueError` if it cannot.

    `json` is its body, or `tensor`, a safetensors file. `undo` makes, of the answer, the call that takes back what this
    one did: an asyncio caller may be cancelled while it waits, and no other caller would know of it. A call that
    `comes_to_its_end` does so even then. One that `is_keyed` opens a session or starts a turn: the server does that
    once for each key. `abandon` cancels what it has begun when the caller stops waiting.
    """

    method: str
    path: str
    parse: Callable[[bytes], T]
    params: Mapping[str, str | int] = field(default_factory=dict)
    json: Mapping[str, Any] | None = None
    tensor: bytes | None = None
    undo: Callable[[T], Call[None]] | None = None
    comes_to_its_end: bool = False
    is_keyed: bool = False
    abandon: Call[Any] | None = None


class TurnOptions(TypedDict, total=False):
    """What a turn runs on (exactly one of `prompt`, `messages` and `token_ids`) and how it samples.

    Only what is new since the last turn is sent: the server keeps the history. It also has the defaults.
    """

    prompt: str
    messages: Sequence[Mapping[str, Any]]
    token_ids: Sequence[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logit_bias: Mapping[int, float]
    structured_outputs: Mapping[str, Any]
    logprobs: int


def create_session(
    metadata: Mapping[str, str] | None, ttl_s: int | None, residency: Residency | None
) -> Call[SessionInfo]:
    """`POST /v1/sessions`."""
    body = _given(metadata=metadata, ttl_s=ttl_s, residency=residency)
    return Call("POST", "/v1/sessions", SessionInfo.model_validate_json, json=body, undo=_close_opened, is_keyed=True)


def get_session(session: str) -> Call[SessionInfo]:
    """`GET /v1/sessions/{id}`."""
    return Call("GET", session_path(session), SessionInfo.model_validate_json)


def get_history(session: str, *, pieces: bool) -> Call[History]:
    """`GET /v1/sessions/{id}/history`."""
    params = {"pieces": "true"} if pieces else {}
    return Call("GET", session_path(session, "history"), History.model_validate_json, params=params)


def list_sessions(state: SessionState | None, tier: Tier | None, after: str | None) -> Call[SessionPage]:
    """`GET /v1/sessions`: the page that follows session `after`, or with None the first."""
    params = _given(state=state, tier=tier, after=after, limit=PAGE_SIZE)
    return Call("GET", "/v1/sessions", SessionPage.model_validate_json, params=params)


def close_session(session: str) -> Call[None]:
    """`DELETE /v1/sessions/{id}`."""
    return Call("DELETE", session_path(session), nothing, comes_to_its_end=True)


def _close_opened(opened: SessionInfo) -> Call[None]:
    return close_session(opened.id)


def generate(session: str, options: TurnOptions, *, stream: bool) -> Call[Turn]:
    """`POST /v1/sessions/{id}/generate`. A streamed answer is for `TurnDecoder`, not for `parse`."""
    body = {**options, "stream": stream}
    path, abandon = session_path(session, "generate"), cancel_turn(session)
    return Call("POST", path, Turn.model_validate_json, json=body, is_keyed=True, abandon=abandon)


def cancel_turn(session: str) -> Call[SessionInfo]:
    """`POST /v1/sessions/{id}/cancel`."""
    return Call("POST", session_path(session, "cancel"), SessionInfo.model_validate_json)


def fork_session(session: str) -> Call[SessionInfo]:
    """`POST /v1/sessions/{id}/fork`."""
    path = session_path(session, "fork")
    return Call("POST", path, SessionInfo.model_validate_json, undo=_close_opened, is_keyed=True)


def export_session(session: str) -> Call[None]:
    """`GET /v1/sessions/{id}/export`. The answer is a file, not for `parse`."""
    return Call("GET", session_path(session, "export"), nothing)


def import_session() -> Call[SessionInfo]:
    """`POST /v1/sessions/import`, with a file as the body."""
    return Call("POST", "/v1/sessions/import", SessionInfo.model_validate_json, undo=_close_opened)


def rewind_session(session: str, to_token: int) -> Call[SessionInfo]:
    """`POST /v1/sessions/{id}/rewind`."""
    path = session_path(session, "rewind")
    return Call("POST", path, SessionInfo.model_validate_json, json={"to_token": to_token})


def set_phase(session: str, phase: Phase, resume_in_ms: float | None) -> Call[PhaseChange]:
    """`POST /v1/sessions/{id}/phase`."""
    body = _given(phase=phase, resume_in_ms=resume_in_ms)
    return Call("POST", session_path(session, "phase"), PhaseChange.model_validate_json, json=body)


def memory() -> Call[MemoryMap]:
    """`GET /v1/memory`."""
    return Call("GET", "/v1/memory", MemoryMap.model_validate_json)


def models() -> Call[tuple[Model, ...]]:
    """`GET /v1/models`."""
    return Call("GET", "/v1/models", lambda body: Listing[Model].model_validate_json(body).data)


def health() -> Call[Health]:
    """`GET /health`."""
    return Call("GET", "/health", Health.model_validate_json)


def session_path(session: str, action: str | None = None) -> str:
    """The path of a session or of something under it."""
    path = f"/v1/sessions/{path_part(session)}"
    return path if action is None else f"{path}/{action}"


def path_part(text: str) -> str:
    """One part of a path: a `/` in it, or nothing but dots, must not become structure."""
    part = quote(text, safe="", errors="replace")
    return part if part.strip(".") else part.replace(".", "%2E")


def _given(**fields: Any) -> dict[str, Any]:
    """The fields that have a value: what is not sent takes the server's default."""
    return {name: value for name, value in fields.items() if value is not None}


def nothing(_body: bytes) -> None:
    """For answers without content."""
