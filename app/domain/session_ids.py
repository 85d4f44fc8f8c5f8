"""Ids of sessions and of responses. Each names the server that made it, if that has a name: its home until it moves."""

import re
import secrets
import time

from app.domain.values import SessionId

REPLICA_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
"""Of a server among others of a cluster."""

_NAMED = re.compile(rf"ses_({REPLICA_NAME.pattern})_[0-9a-f]{{36}}")
_NAMED_RESPONSE = re.compile(rf"resp_({REPLICA_NAME.pattern})_[0-9a-f]{{32}}")


def new_session_id(replica: str | None = None) -> SessionId:
    """A fresh id: the replica, the time in ns, so that ids of one replica sort by age, and 80 random bits, so that
    no client can guess one.
    """
    home = "" if replica is None else f"{replica}_"
    return SessionId(f"ses_{home}{time.time_ns():016x}{secrets.token_hex(10)}")


def home_of(session_id: str) -> str | None:
    """The replica that made the session; None for an id that names none, or is none."""
    named = _NAMED.fullmatch(session_id)
    return None if named is None else named[1]


def new_response_id(replica: str | None = None) -> str:
    """A fresh id of a response: the replica, and 128 random bits, so that no client can guess one."""
    home = "" if replica is None else f"{replica}_"
    return f"resp_{home}{secrets.token_hex(16)}"


def home_of_response(response_id: str) -> str | None:
    """The replica that made the response; None for an id that names none, or is none."""
    named = _NAMED_RESPONSE.fullmatch(response_id)
    return None if named is None else named[1]
