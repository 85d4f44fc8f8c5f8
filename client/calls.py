"""Every route as a value: what to send and how to read the answer. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote

from client.answer import Listing
from client.history_models import Activity, ClosedSessions, Findings, Timeline
from client.memory_models import CapacityEstimate, MemoryEstimate, MemoryMap
from client.models import (
    Detokenized,
    Health,
    History,
    Model,
    Move,
    Phase,
    PhaseChange,
    Residency,
    SessionInfo,
    SessionPage,
    SessionState,
    Tier,
    Tokenized,
    Turn,
    Version,
)

T = TypeVar("T")

PAGE_SIZE = 100
"""The most that the server gives at once."""


class Unset(Enum):
    """In place of an argument that is left out, where None means something else."""

    UNSET = "the client's"


UNSET: Final = Unset.UNSET
Seconds = float | Literal[Unset.UNSET] | None
"""How long the server may be silent during a call: None is for ever, `UNSET` as long as the client says."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and `parse`, which reads the body of its answer and raises `ValueError` if it cannot.

    `json` is its body, or `tensor`, a safetensors file, or `form`, fields and small files of a form to which an
    uploaded file is added under the name `file`. `undo` makes, of the answer, the call that takes back what this one
    did: an asyncio caller may be cancelled while it waits, and no other caller would know of it. A call that
    `comes_to_its_end` does so even then. One that `is_keyed` opens a session or starts a turn: the server does that
    once for each key. `abandon` cancels what it has begun when the caller stops waiting. One that `asks_state` has an
    answer in each error of the server: it is not retried then.
    """

    method: str
    path: str
    parse: Callable[[bytes], T]
    params: Mapping[str, str | int | float] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Mapping[str, Any] | None = None
    tensor: bytes | None = None
    form: Mapping[str, str | bytes] | None = None
    file: str = "weights"
    undo: Callable[[T], Call[None]] | None = None
    comes_to_its_end: bool = False
    is_keyed: bool = False
    abandon: Call[Any] | None = None
    asks_state: bool = False


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
    metadata: Mapping[str, str] | None, ttl_s: int | None, residency: Residency | None, model: str | None
) -> Call[SessionInfo]:
    """`POST /v1/sessions`."""
    body = given({"metadata": metadata, "ttl_s": ttl_s, "residency": residency, "model": model})
    return Call("POST", "/v1/sessions", SessionInfo.model_validate_json, json=body, undo=_close_opened, is_keyed=True)


def get_session(session: str) -> Call[SessionInfo]:
    """`GET /v1/sessions/{id}`."""
    return Call("GET", session_path(session), SessionInfo.model_validate_json)


def get_history(session: str, *, pieces: bool) -> Call[History]:
    """`GET /v1/sessions/{id}/history`."""
    params = {"pieces": "true"} if pieces else {}
    return Call("GET", session_path(session, "history"), History.model_validate_json, params=params)


def list_sessions(
    *,
    state: SessionState | None = None,
    tier: Tier | None = None,
    name: str | None = None,
    after: str | None = None,
    limit: int = PAGE_SIZE,
) -> Call[SessionPage]:
    """`GET /v1/sessions`: the page that follows session `after`, or with None the first."""
    params = given({"state": state, "tier": tier, "name": name, "after": after, "limit": limit})
    return Call("GET", "/v1/sessions", SessionPage.model_validate_json, params=params)


def close_session(session: str) -> Call[None]:
    """`DELETE /v1/sessions/{id}`."""
    return Call("DELETE", session_path(session), nothing, comes_to_its_end=True)


def _close_opened(opened: SessionInfo) -> Call[None]:
    return close_session(opened.id)


def generate(session: str, options: Mapping[str, Any], *, stream: bool) -> Call[Turn]:
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


def label_session(session: str, labels: Mapping[str, str | None]) -> Call[SessionInfo]:
    """`PATCH /v1/sessions/{id}`."""
    return Call("PATCH", session_path(session), SessionInfo.model_validate_json, json={"metadata": dict(labels)})


def rewind_session(session: str, to_token: int) -> Call[SessionInfo]:
    """`POST /v1/sessions/{id}/rewind`."""
    path = session_path(session, "rewind")
    return Call("POST", path, SessionInfo.model_validate_json, json={"to_token": to_token})


def set_phase(session: str, phase: Phase, resume_in_ms: float | None) -> Call[PhaseChange]:
    """`POST /v1/sessions/{id}/phase`."""
    body = given({"phase": phase, "resume_in_ms": resume_in_ms})
    return Call("POST", session_path(session, "phase"), PhaseChange.model_validate_json, json=body)


def move_session(session: str, replica: str) -> Call[Move]:
    """`POST /v1/sessions/{id}/move`."""
    return Call("POST", session_path(session, "move"), Move.model_validate_json, json={"replica": replica})


def settle_session(session: str, peer_is_dead: str) -> Call[SessionInfo]:
    """`POST /v1/sessions/{id}/settle`."""
    path, body = session_path(session, "settle"), {"peer_is_dead": peer_is_dead}
    return Call("POST", path, SessionInfo.model_validate_json, json=body)


def events(last_id: str | None) -> Call[None]:
    """`GET /v1/events`: what follows the event `last_id`, or with None everything. The answer is for `read_event`."""
    return Call("GET", "/v1/events", nothing, headers={} if last_id is None else {"Last-Event-ID": last_id})


def memory() -> Call[MemoryMap]:
    """`GET /v1/memory`."""
    return Call("GET", "/v1/memory", MemoryMap.model_validate_json)


def estimate(tokens: int, bandwidth: float | None) -> Call[MemoryEstimate]:
    """`GET /v1/memory/estimate`."""
    params = given({"tokens": tokens, "bandwidth": bandwidth})
    return Call("GET", "/v1/memory/estimate", MemoryEstimate.model_validate_json, params=params)


def capacity(body: Mapping[str, Any]) -> Call[CapacityEstimate]:
    """`POST /v1/capacity/estimate`."""
    return Call("POST", "/v1/capacity/estimate", CapacityEstimate.model_validate_json, json=body)


def findings() -> Call[Findings]:
    """`GET /v1/findings`."""
    return Call("GET", "/v1/findings", Findings.model_validate_json)


def activity(since: float, step_s: int, limit: int) -> Call[Activity]:
    """`GET /v1/activity`."""
    params = {"since": since, "step_s": step_s, "limit": limit}
    return Call("GET", "/v1/activity", Activity.model_validate_json, params=params)


def closed_sessions(find: str, before: float | None, limit: int) -> Call[ClosedSessions]:
    """`GET /v1/sessions/closed`."""
    params = given({"find": find, "before": before, "limit": limit})
    return Call("GET", "/v1/sessions/closed", ClosedSessions.model_validate_json, params=params)


def timeline(session: str, before: int | None, limit: int) -> Call[Timeline]:
    """`GET /v1/sessions/{id}/timeline`."""
    params = given({"before": before, "limit": limit})
    return Call("GET", session_path(session, "timeline"), Timeline.model_validate_json, params=params)


def tokenize(body: Mapping[str, Any]) -> Call[tuple[int, ...]]:
    """`POST /tokenize`."""
    return Call("POST", "/tokenize", lambda answer: Tokenized.model_validate_json(answer).tokens, json=body)


def detokenize(token_ids: Sequence[int]) -> Call[str]:
    """`POST /detokenize`."""
    body = {"tokens": list(token_ids)}
    return Call("POST", "/detokenize", lambda answer: Detokenized.model_validate_json(answer).prompt, json=body)


def models() -> Call[tuple[Model, ...]]:
    """`GET /v1/models`."""
    return Call("GET", "/v1/models", lambda body: Listing[Model].model_validate_json(body).data)


def load_model(name: str, path: str) -> Call[Model]:
    """`POST /v1/models/load`."""
    return Call("POST", "/v1/models/load", Model.model_validate_json, json={"name": name, "path": path})


def unload_model(name: str) -> Call[None]:
    """`POST /v1/models/unload`."""
    return Call("POST", "/v1/models/unload", lambda body: None, json={"name": name})


def health() -> Call[Health]:
    """`GET /health`."""
    return Call("GET", "/health", Health.model_validate_json)


def ready() -> Call[Health]:
    """`GET /ready`."""
    return Call("GET", "/ready", Health.model_validate_json, asks_state=True)


def version() -> Call[Version]:
    """`GET /version`."""
    return Call("GET", "/version", Version.model_validate_json)


def session_path(session: str, action: str | None = None) -> str:
    """The path of a session or of something under it."""
    path = f"/v1/sessions/{path_part(session)}"
    return path if action is None else f"{path}/{action}"


def path_part(text: str) -> str:
    """One part of a path: a `/` in it, or nothing but dots, must not become structure."""
    part = quote(text, safe="", errors="replace")
    return part if part.strip(".") else part.replace(".", "%2E")


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a method was given of its arguments, apart from `self` and `timeout`, which are not for the server.

    What is not sent takes the server's default.
    """
    return {name: value for name, value in arguments.items() if value is not None and name not in ("self", "timeout")}


def nothing(_body: bytes) -> None:
    """For answers without content."""
