"""`/v1/responses` as a WebSocket: one response after the other, each asked for by a `response.create` event."""

from contextlib import closing

from fastapi import WebSocket
from starlette.routing import WebSocketRoute

from app.domain.errors import BadRequest, DjinnError, FieldOutOfRange
from app.domain.limits import MAX_NAME
from app.openai.responses.memory import UnstoredConversation
from app.routers.dependencies import Services
from app.routers.openai.binding import SESSION_HEADER
from app.routers.openai.response_call import ResponseCall
from app.routers.openai.response_connection import ResponseConnection
from app.web.errors.handlers import error_response


async def connect_responses(websocket: WebSocket) -> None:
    """Serve one connection until the client closes it."""
    websocket.scope["route"] = ROUTE  # as FastAPI does for its own
    services: Services = websocket.app.state.services
    owner: str | None = websocket.state.owner
    try:
        session_name = _session_name(websocket)
        if session_name is not None:
            services.bound_sessions.find(owner, session_name)  # raises where it is, if it is on another server
    except DjinnError as error:
        refusal = BadRequest(error) if isinstance(error, FieldOutOfRange) else error
        await websocket.send_denial_response(error_response(refusal, websocket.scope))
        return
    with closing(UnstoredConversation(services.sessions)) as unstored:
        call = ResponseCall(services, owner, unstored, session_name)
        await websocket.accept()
        await ResponseConnection(websocket, services, call).serve()


def _session_name(websocket: WebSocket) -> str | None:
    """What `X-Session-ID` says. Raises `FieldOutOfRange` for more than one, and for query parameters."""
    for name in websocket.query_params:
        raise FieldOutOfRange(f"{name}: this route takes no query parameters", param=name)
    names = set(websocket.headers.getlist(SESSION_HEADER))
    if len(names) > 1 or not all(1 <= len(name) <= MAX_NAME for name in names):
        message = f"{SESSION_HEADER}: one name of 1 to {MAX_NAME} characters"
        raise FieldOutOfRange(message, param=SESSION_HEADER)
    return next(iter(names), None)


ROUTE = WebSocketRoute("/v1/responses", connect_responses)
"""Not one of FastAPI's: what the application does to every request is for HTTP."""
