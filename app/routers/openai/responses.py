"""`POST /v1/responses`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from app.domain.errors import NotFound
from app.openai.responses.body import ResponseBody
from app.openai.responses.conversation import StoredResponse
from app.openai.responses.encoded import to_json
from app.openai.responses.events import CANCELLED_EVENT, LAST_EVENTS
from app.openai.responses.memory import UnstoredConversation
from app.openai.responses.response import ResponseObject
from app.openai.responses.stream_events import ResponseEvent
from app.routers.dependencies import CleanupDep, KeyedDep, OwnerDep, Services, ServicesDep
from app.routers.openai.binding import SESSION_HEADER, SessionNameDep
from app.routers.openai.response_call import ResponseCall
from app.routers.openai.response_run import ResponseRun
from app.routers.openai.route import IGNORED_DESCRIPTION, IgnoredDep, OpenAIRoute, openai_errors
from app.sessions.keyed import KeyedRequest
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
    keyed: KeyedDep,
) -> Response:
    """Generate a response. A client that disconnects cancels it."""
    if keyed is not None and (made := _made_before(services, keyed)) is not None:
        return _again(made, keyed, stream=body.stream)
    unstored = UnstoredConversation(services.sessions)
    cleanup.callback(unstored.close)
    call = ResponseCall(services, owner, unstored, session_name, keyed)
    run = await unless_disconnected(request, call.start(body, ignored, cleanup))
    if body.stream:
        return _with_session(run, EventStream(_stream(run, keyed)))
    await unless_disconnected(request, _finish(run))
    if keyed is not None:
        keyed.is_answered = True
    return _with_session(run, Response(to_json(run.response), media_type="application/json"))


async def _stream(run: ResponseRun, keyed: KeyedRequest | None) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.events()) as events:
        async for event in events:
            yield sse_event(event["type"], orjson.dumps(event))
    if keyed is not None and run.error is None:
        keyed.is_answered = True


def _made_before(services: Services, keyed: KeyedRequest) -> StoredResponse | None:
    """The response that the request has made when it came first; None: there is none."""
    if not keyed.is_done or keyed.response is None:
        return None
    try:
        return services.responses.find(keyed.owner, keyed.response)
    except NotFound:  # the server died when the turn was kept, but not yet the response
        keyed.is_done = False
        return None


def _again(made: StoredResponse, keyed: KeyedRequest, *, stream: bool) -> Response:
    """The answer of a response that was made before. Its events are fewer than those of one that is made."""
    keyed.is_answered = True
    answer: Response
    if stream:
        answer = EventStream(_events_again(made.answer))
    else:
        answer = Response(to_json(made.answer), media_type="application/json")
    answer.headers[SESSION_HEADER] = made.conversation.session.id
    return answer


async def _events_again(response: ResponseObject) -> AsyncGenerator[bytes, None]:
    whole = orjson.Fragment(to_json(response))
    events: list[dict[str, Any]] = [{"type": "response.created", "response": whole}]
    for index, item in enumerate(response.output):
        fields = {"output_index": index, "item": orjson.Fragment(to_json(item))}
        events += [{"type": f"response.output_item.{what}", **fields} for what in ("added", "done")]
    events.append({"type": LAST_EVENTS.get(response.status, CANCELLED_EVENT), "response": whole})
    for number, event in enumerate(events):
        yield sse_event(event["type"], orjson.dumps({**event, "sequence_number": number}))


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
