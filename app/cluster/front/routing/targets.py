"""What a request is about: the part of the API that tells who must answer it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

SESSIONS = "/v1/sessions"
RESPONSES = "/v1/responses"
COMPACT = f"{RESPONSES}/compact"
CONVERSATIONS = "/v1/conversations"
BETWEEN_SERVERS = "/v1/cluster"


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
    EVERY = "every"
    """Every replica, which must all agree: what is stored is for all sessions."""
    MERGED = "merged"
    """Every replica: the answer is made of all of theirs."""
    ANY = "any"
    """Any replica: each would answer alike."""
    NOBODY = "nobody"
    """Servers among each other."""


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a request is for, and the id that its path names."""

    about: About
    id: str = ""


CALLS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})
TURNS = ("/generate", "/resume")
"""What paths of sessions end with that ask for a turn."""
HEALTH = "/health"
MERGED = frozenset({SESSIONS, "/v1/models", "/v1/memory", "/v1/events", "/metrics", "/ready", HEALTH})


def target_of(method: str, path: str) -> Target:
    """What a request for the path is about. Unknown paths go to any replica, which refuses them."""
    if path == BETWEEN_SERVERS or path.startswith(f"{BETWEEN_SERVERS}/"):
        return Target(About.NOBODY)
    if (method == "GET" and path in MERGED) or (method == "HEAD" and path == HEALTH):
        return Target(About.MERGED)
    if method == "POST" and path in (SESSIONS, f"{SESSIONS}/import", CONVERSATIONS):
        return Target(About.NEW)
    if method == "POST" and path in CALLS:
        return Target(About.CALL)
    if method == "POST" and path in (RESPONSES, COMPACT):
        return Target(About.CREATE_RESPONSE)
    if path.startswith("/v1/vectors") and method not in ("GET", "HEAD", "OPTIONS"):
        return Target(About.EVERY)
    owned = ((SESSIONS, About.SESSION), (RESPONSES, About.RESPONSE), (CONVERSATIONS, About.RESPONSE))
    for prefix, about in owned:
        if path.startswith(f"{prefix}/"):
            return Target(about, path[len(prefix) + 1 :].partition("/")[0])
    return Target(About.ANY)


def is_turn(method: str, path: str) -> bool:
    """Whether the request asks for a turn, or for the rest of one."""
    return method == "POST" and (
        path in CALLS or path in (RESPONSES, COMPACT) or (path.startswith(f"{SESSIONS}/") and path.endswith(TURNS))
    )
