"""Which replica a request is for, as far as its method, path and body tell."""

from __future__ import annotations

import codecs
import enum
from typing import Any, NamedTuple

import orjson

SESSIONS = "/v1/sessions"
RESPONSES = "/v1/responses"
COMPACT, INPUT_TOKENS = f"{RESPONSES}/compact", f"{RESPONSES}/input_tokens"
CONVERSATIONS = "/v1/conversations"
EVENTS, MODELS, MEMORY = "/v1/events", "/v1/models", "/v1/memory"
UPLOADS = ("/v1/vectors", "/v1/dictionaries", "/v1/lenses", "/v1/probes")
"""What all sessions may name."""


class About(enum.Enum):
    """Whom a request is for."""

    SESSION = "session"
    """The replica that has the session of the path."""
    RESPONSE = "response"
    """The replica that has the response or the conversation of the path."""
    CREATE_RESPONSE = "create_response"
    """A call that may name a session in a header, and a response in its body."""
    CALL = "call"
    """A call that may name a session in a header."""
    NEW = "new"
    """Any replica with room: it opens a session."""
    FILES = "files"
    """The replica that keeps the caller's files and batches."""
    EVERY = "every"
    """Every replica: what is stored must be the same at all."""
    GATHERED = "gathered"
    """Every replica: their answers are merged."""
    HERE = "here"
    """The replica that is asked: each would answer alike, or only for itself."""


OWNED = frozenset({About.SESSION, About.RESPONSE, About.CREATE_RESPONSE, About.CALL, About.FILES})
"""Requests that have an owner."""


class Target(NamedTuple):
    """Whom a request is for, and the id that its path names."""

    about: About
    id: str = ""


CALLS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})
TURNS = ("/generate", "/resume")
"""How the paths of sessions end that ask for a turn."""
GATHERED = frozenset({SESSIONS, MODELS, MEMORY, EVENTS, *UPLOADS})
PATHS_WITH_IDS = ((SESSIONS, About.SESSION), (RESPONSES, About.RESPONSE), (CONVERSATIONS, About.RESPONSE))


def target_of(method: str, path: str) -> Target:
    """What a request for the path is about. Unknown paths are for any replica, which refuses them."""
    if method == "GET" and path in GATHERED:
        return Target(About.GATHERED)
    if method == "POST":
        if path in (SESSIONS, f"{SESSIONS}/import", CONVERSATIONS):
            return Target(About.NEW)
        if path in CALLS:
            return Target(About.CALL)
        if path in (RESPONSES, COMPACT, INPUT_TOKENS):
            return Target(About.CREATE_RESPONSE)
    if path.startswith(UPLOADS) and method not in ("GET", "HEAD", "OPTIONS"):
        return Target(About.EVERY)
    if path.startswith(("/v1/files", "/v1/batches")):
        return Target(About.FILES)
    for prefix, about in PATHS_WITH_IDS:
        if path.startswith(f"{prefix}/"):
            return Target(about, path[len(prefix) + 1 :].partition("/")[0])
    return Target(About.HERE)


def is_turn(method: str, path: str) -> bool:
    """Whether the request asks for a turn, or for the rest of one."""
    return method == "POST" and (
        path in CALLS or path in (RESPONSES, COMPACT) or (path.startswith(f"{SESSIONS}/") and path.endswith(TURNS))
    )


def previous_response(content: bytes) -> str | None:
    """The response or conversation that a call continues. None also for a body that a replica will refuse."""
    try:
        fields: Any = orjson.loads(content.removeprefix(codecs.BOM_UTF8))  # as replicas read it
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    held = fields.get("conversation")
    found = held.get("id") if isinstance(held, dict) else held
    value = fields.get("previous_response_id") if found is None else found
    return value if isinstance(value, str) else None
