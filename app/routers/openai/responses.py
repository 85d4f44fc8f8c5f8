"""`POST /v1/responses`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from app.openai.responses.body import ResponseBody
from app.openai.responses.encoded import to_json
from app.openai.responses.memory import UnstoredConversation
from app.openai.responses.response import ResponseObject
from app.openai.responses.stream_events import ResponseEvent
from app.routers.dependencies import CleanupDep, OwnerDep, ServicesDep
from app.routers.openai.binding import SESSION_HEADER, SessionNameDep
from app.routers.openai.response_call import ResponseCall
from app.routers.openai.response_run import ResponseRun
from app.routers.openai.route import IGNORED_DESCRIPTION, IgnoredDep, OpenAIRoute, openai_errors
from app.web.openapi.document import component
from app.web.sse import EventStream, sse_event, unless_disconnected

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)
SESSION_ID = {"description": "the session that the response was generated in", "schema": {"type": "string"}}
ANSWERS: dict[int | str, dict[str, Any]] = {
    **openai_errors(404, 409, 421, 429, 503),
    200: {
        "description": "The response; with `stream`, the events of the Responses API, each with its name.",
        "headers": {SESSION_HEADER: SESSION_ID, **IGNORED_DESCRIPTION},
        "content": {EventStream.media_type: {"schema": component(ResponseEvent)}},
    },
}


@router.post("/v1/responses", operation_id="createResponse", response_model=ResponseObject, responses=ANSWERS)
async def create_response(
    request: Request,
    body: ResponseBody,
    services: ServicesDep,
    owner: OwnerDep,
    cleanup: CleanupDep,
    session_name: SessionNameDep,
    ignored: IgnoredDep,
) -> Response:
    """Generate a response. A client that disconnects cancels it."""
    unstored = UnstoredConversation(services.sessions)
    cleanup.callback(unstored.close)
    call = ResponseCall(services, owner, unstored, session_name)
    run = await unless_disconnected(request, call.start(body, ignored, cleanup))
    if body.stream:
        return _with_session(run, EventStream(_stream(run)))
    await unless_disconnected(request, _finish(run))
    return _with_session(run, Response(to_json(run.response), media_type="application/json"))


async def _stream(run: ResponseRun) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.events()) as events:
        async for event in events:
            yield sse_event(event["type"], orjson.dumps(event))


async def _finish(run: ResponseRun) -> None:
    """Read the response to its end. Raises the error of one that failed."""
    async with aclosing(run.events()) as events:
        async for _ in events:
            pass
    if run.error is not None:
        raise run.error


def _with_session(run: ResponseRun, answer: Response) -> Response:
    if run.session is not None:
        answer.headers[SESSION_HEADER] = run.session.id
    return answer
