"""`/v1/responses` as a WebSocket: one response after the other, each asked for by a `response.create` event."""

from contextlib import closing

from fastapi import WebSocket
from starlette.routing import WebSocketRoute

from app.openai.responses.memory import UnstoredConversation
from app.routers.dependencies import Services
from app.routers.openai.call import SESSION_HEADER
from app.routers.openai.response_call import ResponseCall
from app.routers.openai.response_connection import ResponseConnection


async def connect_responses(websocket: WebSocket) -> None:
    """Serve one connection until the client closes it."""
    services: Services = websocket.app.state.services
    owner: str | None = websocket.state.owner
    with closing(UnstoredConversation(services.sessions)) as unstored:
        call = ResponseCall(services, owner, unstored, websocket.headers.get(SESSION_HEADER))
        await websocket.accept()
        await ResponseConnection(websocket, services, call).serve()


ROUTE = WebSocketRoute("/v1/responses", connect_responses)
"""Not one of FastAPI's: what the application does to every request is for HTTP."""
