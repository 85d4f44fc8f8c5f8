"""The request that a piece of work is for, and its session: what each line of the log and of the audit log names."""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

SESSION_ID = re.compile(r"ses_(?:[a-z][a-z0-9]{0,15}_)?[0-9a-f]{36}")
"""Anything else in its place may be a text of the caller's."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
"""HTTP allows any word as a method, so another one may be a text of the caller's too."""

REQUEST: ContextVar[Mapping[str, Any] | None] = ContextVar("REQUEST", default=None)
"""The ASGI scope of the request that this task works for. What the routes find out later is in it too."""


def request_id() -> str | None:
    """That of the task's request; None if it works for none."""
    scope = REQUEST.get()
    return None if scope is None else scope.get("state", {}).get("request_id")


def session_of(scope: Mapping[str, Any] | None, answered: str = "") -> str | None:
    """The session that the request has opened or was bound to, or that its path names. `answered` is the one that the
    answer names.
    """
    if scope is None:
        return None
    session = scope.get("state", {}).get("session") or answered or scope.get("path_params", {}).get("session_id", "")
    return session if SESSION_ID.fullmatch(session) else None


def session_id() -> str | None:
    """That of the task's request, if it is about one."""
    return session_of(REQUEST.get())


def method_of(scope: Mapping[str, Any]) -> str | None:
    """The request's, if it is a common one; that of a WebSocket is the one that it began with."""
    method = scope.get("method", "GET")
    return method if method in METHODS else None


def route_of(scope: Mapping[str, Any]) -> str | None:
    """The template of the request's path, without what the caller put in it; None where there is no route."""
    route = scope.get("route")
    return None if route is None else route.path
