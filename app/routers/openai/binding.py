"""What binds a call to a session: its header `X-Session-ID`, or the history that it continues."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated

from fastapi import Depends, Header, Request

from app.domain.errors import FieldOutOfRange
from app.domain.limits import MAX_NAME
from app.routers.dependencies import Services
from app.sessions.session import Session

SESSION_HEADER = "X-Session-ID"
SessionHeader = Annotated[
    str | None,
    Header(
        alias=SESSION_HEADER,
        min_length=1,
        max_length=MAX_NAME,
        description="binds the call to a session: a session id, or any name, whose first use opens a session",
    ),
]


async def _session_name(request: Request, session_name: SessionHeader = None) -> str | None:
    if len(set(request.headers.getlist(SESSION_HEADER))) > 1:
        raise FieldOutOfRange(f"{SESSION_HEADER}: a call is bound to one session", param=SESSION_HEADER)
    return session_name


SessionNameDep = Annotated[str | None, Depends(_session_name)]
"""What `X-Session-ID` says."""


def bound_session(
    services: Services,
    owner: str | None,
    name: str | None,
    prompts: Sequence[Sequence[int]],
    *,
    n: int,
    user: str | None,
    undo: ExitStack,
) -> Session | None:
    """The session that a call of `owner` is bound to, by the `name` in its header or by its history; None: it is not.

    A name's first use opens a session, with `user` as metadata; `undo` drops it if the call cannot start.
    Raises `FieldOutOfRange` for several prompts, or `n` choices.
    """
    bound_sessions = services.bound_sessions
    if name is None and not (services.settings.bind_by_prefix and n == len(prompts) == 1):
        return None
    if n > 1:
        raise FieldOutOfRange(f"n must be 1 with {SESSION_HEADER}: a session has one history", param="n")
    if len(prompts) > 1:
        raise FieldOutOfRange(f"prompt must be one prompt with {SESSION_HEADER}", param="prompt")
    found = bound_sessions.find_continued(owner, prompts[0]) if name is None else bound_sessions.find(owner, name)
    if found is not None:
        return found
    if name is None:
        session = bound_sessions.open_unnamed(owner, metadata=labels(user))
    else:
        session = bound_sessions.open(owner, name, metadata=labels(user))
    undo.callback(services.sessions.drop, session)
    return session


def labels(user: str | None) -> dict[str, str]:
    """The metadata of a session that the call opens; one that it finds keeps its own."""
    return {} if user is None else {"user": user}
