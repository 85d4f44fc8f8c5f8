"""`/v1/responses` as a WebSocket: one response after the other."""

import asyncio
from contextlib import AsyncExitStack, aclosing, closing
from typing import Any

import orjson
from fastapi import WebSocket, WebSocketDisconnect
from starlette.routing import WebSocketRoute

from app.domain.errors import DjinnError, MalformedRequest
from app.openai.response_events import Event
from app.openai.response_input import ResponseBody
from app.openai.response_store import UnstoredConversation
from app.routers.api_calls import ApiCall, as_bad_request, client_hints, name_in
from app.routers.dependencies import Services
from app.routers.response_call import start_response
from app.web.bodies import read_in_turn
from app.web.errors import error_body, error_response, read_body, visible_error
from app.wire.calls import IgnoredFields

CREATE = "response.create"


class ResponseConnection:
    """Reads the client's events, and sends those of one response at a time."""

    def __init__(self, websocket: WebSocket, session_name: str | None, unstored: UnstoredConversation) -> None:
        self._websocket = websocket
        self._services: Services = websocket.app.state.services
        self._owner: str | None = websocket.state.owner
        self._session_name = session_name
        self._unstored = unstored
        self._running: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Return when the client has gone. A response that is being generated then is cancelled."""
        try:
            while True:
                await self._take(await self._websocket.receive())
        except WebSocketDisconnect:
            pass
        finally:
            if self._running is not None:
                self._running.cancel()
                await asyncio.wait([self._running])

    async def _take(self, message: Any) -> None:
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        text = message.get("text")
        try:
            fields = await self._read(text.encode() if text is not None else message.get("bytes") or b"")
        except DjinnError as error:
            await self._send(_error_event(error))
            return
        self._running = asyncio.create_task(self._answer(fields))

    async def _read(self, message: bytes) -> dict[str, Any]:
        """The fields of a `response.create` event. Raises `MalformedRequest` for any other."""
        services = self._services
        fields = await read_in_turn(message, services.info.max_model_len, services.side_work, self._owner)
        if not isinstance(fields, dict) or fields.get("type") != CREATE:
            raise MalformedRequest.at("type", f"only events of type {CREATE} are taken")
        if self._running is not None and not self._running.done():
            raise MalformedRequest("a response is being generated: this connection runs one at a time")
        return {name: value for name, value in fields.items() if name != "type"}

    async def _answer(self, fields: dict[str, Any]) -> None:
        ignored = IgnoredFields(strict=self._services.settings.strict_fields)
        try:
            ignored.add(self._websocket.query_params)
            self._websocket.state.admit()  # the key may have ended since the connection began
            async with AsyncExitStack() as cleanup:
                client = client_hints(self._websocket.headers)
                call = ApiCall(
                    self._services,
                    self._owner,
                    cleanup,
                    ignored,
                    self._session_name,
                    client=client,
                    stays_connected=True,
                )
                body = read_body(ResponseBody, fields)
                if body.background:  # what runs here ends with the connection
                    body = body.model_copy(update={"background": False})
                    ignored.add(["background"])
                run = await start_response(call, self._unstored, body)
                for label in ignored.labels():
                    self._services.metrics.ignored_fields.labels(label).inc()
                async with aclosing(run.events()) as events:
                    async for event in events:
                        if event["sequence_number"] == 0 and ignored.header:  # there is no header to name them
                            event["ignored_fields"] = ignored.header
                        await self._send(event)
        except WebSocketDisconnect:
            pass  # the reader of the client's events sees it too
        except Exception as error:
            await self._send(_error_event(error))

    async def _send(self, event: Event) -> None:
        await self._websocket.send_text(orjson.dumps(event).decode())


def _error_event(error: Exception) -> Event:
    known = as_bad_request(visible_error(error))
    headers = {} if known.retry_after_s is None else {"headers": {"Retry-After": str(known.retry_after_s)}}
    return {"type": "error", "status": known.status, "error": orjson.loads(error_body(known))["error"], **headers}


async def connect_responses(websocket: WebSocket) -> None:
    """Serve one connection until the client closes it."""
    websocket.scope["route"] = ROUTE  # as FastAPI does for its own
    services: Services = websocket.app.state.services
    try:
        owner = websocket.state.owner
        session_name = name_in(websocket.headers, services, owner)
        if session_name is not None:  # if it is on another server, this raises where
            services.bound_sessions.find(owner, session_name)
    except DjinnError as error:
        await websocket.send_denial_response(error_response(as_bad_request(error), websocket.scope))
        return
    with closing(UnstoredConversation(services.sessions)) as unstored:
        await websocket.accept()
        await ResponseConnection(websocket, session_name, unstored).serve()


ROUTE = WebSocketRoute("/v1/responses", connect_responses)
"""Not one of FastAPI's: what the application does to every request is for HTTP."""
