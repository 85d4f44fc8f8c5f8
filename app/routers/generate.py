"""One turn of a session: only what is new travels in, tokens come out as they are made."""

from contextlib import AsyncExitStack

from fastapi import APIRouter, Request, Response

from app.domain.errors import WrongState
from app.domain.values import SessionState
from app.routers.dependencies import CleanupDep, KeyedDep, Services, ServicesDep, SessionDep, errors
from app.routers.prompts import new_token_ids
from app.routers.turn_answer import TURN_RESPONSES, answer_turn
from app.sessions.keyed import KeyedRequest
from app.sessions.session import Session
from app.sessions.turns import TurnRequest
from app.text.generation import TurnReader
from app.web.json_body import JsonRoute
from app.web.sse import unless_disconnected
from app.wire.turns import GenerateBody, TurnView

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=JsonRoute)


@router.post(
    "/{session_id}/generate",
    operation_id="generate",
    response_model=TurnView,
    responses={**errors(400, 404, 409, 429, 503), **TURN_RESPONSES},
)
async def generate(
    request: Request,
    session: SessionDep,
    body: GenerateBody,
    services: ServicesDep,
    cleanup: CleanupDep,
    keyed: KeyedDep,
) -> Response:
    """Append to the session's history and generate, to the end or to where a breakpoint pauses the turn.

    A client that disconnects while the turn runs cancels it. With an `Idempotency-Key` it has 30 s to come back.
    """
    if keyed is not None and keyed.turn is not None:
        reader = services.sessions.turns.repeat(session, keyed.turn, body.to_text_rule())
    else:
        reader = await unless_disconnected(request, _start(session, body, services, cleanup, keyed))
    return await answer_turn(request, session, reader, stream=body.stream, keyed=keyed)


async def _start(
    session: Session, body: GenerateBody, services: Services, cleanup: AsyncExitStack, keyed: KeyedRequest | None
) -> TurnReader:
    turns = services.sessions.turns
    body.check_vocabulary(services.info.vocab_size)
    sampling = body.to_params(services.sampling, logprobs=body.logprobs)
    await turns.compile_grammar(session.owner, sampling, body.min_tokens, cleanup)
    token_ids = await _encode(session, body, services)
    max_tokens = turns.room(len(session.history) + len(token_ids), body.max_tokens, param=body.input_field)
    request = TurnRequest(
        token_ids,
        sampling,
        body.to_stop_rule(max_tokens=max_tokens, eos_token_ids=services.tokens.eos_token_ids),
        body.to_text_rule(logprobs=body.logprobs),
        param=body.input_field,
        keyed=keyed,
    )
    return turns.start(session, request, cleanup)


async def _encode(session: Session, body: GenerateBody, services: Services) -> list[int]:
    """The turn's new tokens. Raises `WrongState` if the history that they were made to follow is not the one now."""
    session.require(SessionState.IDLE, to="start a turn")
    turn, history = session.turn, session.history[:]
    info = services.info
    token_ids = await services.side_work.run(
        session.owner, new_token_ids, body, services.tokens, history, info.vocab_size, info.max_model_len
    )
    session.require(SessionState.IDLE, to="start a turn")
    if session.turn is not turn or len(session.history) != len(history):
        raise WrongState(f"cannot start a turn: the history of session {session.id} has changed meanwhile")
    return token_ids
