"""Turns of sessions: what is new travels in, tokens come out as they are made, pauses end."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from app.domain.errors import Draining, MalformedRequest, Moving, NotDurable, WrongState
from app.domain.values import SessionState, TokenLogprobs
from app.messages import Paused, Reading, TurnFinished
from app.routers.dependencies import CleanupDep, KeyedDep, OwnerDep, Services, ServicesDep, SessionDep, errors
from app.routers.edits import checkpoint_target, to_edits
from app.sessions.keyed import KeyedRequest
from app.sessions.session import Session
from app.sessions.turns import TurnRequest
from app.text.generation import TextChunk, TurnReader
from app.text.tokenizer import TextLimit, Tokens
from app.tools.definitions import mark_instructions
from app.web.bodies import JsonRoute
from app.web.errors import body_of
from app.web.openapi import component
from app.web.sse import EventStream, sse_event, unless_disconnected
from app.wire.base import check_token_ids
from app.wire.checkpoint import CheckpointView, ResumeBody
from app.wire.turns import GenerateBody, TokenEvent, TurnErrorBody, TurnEvent, TurnView, by_kind, event_of

REPLY = "djinn-stands-for-a-reply"
EXCHANGE: list[dict[str, str]] = [{"role": "user", "content": "."}, {"role": "assistant", "content": REPLY}]
"""A conversation that ends as a session's history does: what a template writes behind `REPLY` is the same for both."""


def new_token_ids(
    body: GenerateBody, tokens: Tokens, history: Sequence[int], vocab_size: int, max_model_len: int
) -> list[int]:
    """The tokens of `body`'s input, as they follow `history`.

    A prompt is taken as it is; the special token that a tokenizer puts in front comes only where nothing stands
    before. Raises `FieldOutOfRange` for an id outside the vocabulary, `MalformedRequest` if the chat template rejects
    a message, `ContextTooLong` for a text that is certainly too long.
    """
    limit = TextLimit(body.input_field, max_model_len, len(history))
    if body.token_ids is not None:
        check_token_ids(body.token_ids, vocab_size, param="token_ids")
        return body.token_ids
    if body.prompt is not None:
        return tokens.encode(body.prompt, add_special_tokens=not history, limit=limit)
    messages = [message.model_dump() for message in body.messages or ()]
    if not history:
        return tokens.render_chat(messages, limit=limit)
    return following_token_ids(messages, tokens, history[-1], limit)


def following_token_ids(
    messages: list[dict[str, str]], tokens: Tokens, last_token_id: int, limit: TextLimit | None = None
) -> list[int]:
    """What a chat template writes between an assistant's reply and the next one, with `messages` in between.

    The history is taken to end with a reply of the assistant, which may be cut short or empty. Appending these tokens
    to it gives what rendering the whole conversation would give: the template closes the reply, writes the new messages
    and opens the next reply; a default system prompt is not written again. A reply that ended by itself has its end
    token in the history already, and everything up to that token is left out here.
    """
    closing = _after_reply(EXCHANGE, tokens, None, open_next=False)
    following = _after_reply(EXCHANGE + messages, tokens, limit, open_next=True)
    if last_token_id in tokens.eos_token_ids and last_token_id in closing and last_token_id in following:
        return following[following.index(last_token_id) + 1 :]
    return following


def _after_reply(
    messages: list[dict[str, str]], tokens: Tokens, limit: TextLimit | None, *, open_next: bool
) -> list[int]:
    """The tokens of everything behind `REPLY`, as they are when it stands before them.

    Raises `MalformedRequest` if the template rejects the messages or does not write `REPLY`.
    """
    text = tokens.chat_text(messages, add_generation_prompt=open_next)
    if REPLY not in text:
        raise MalformedRequest(
            "the model's chat template leaves out earlier replies, so these messages cannot follow the history",
            param="messages",
        )
    whole = tokens.encode(text, add_special_tokens=False, limit=limit)
    before = tokens.encode(text[: text.index(REPLY) + len(REPLY)], add_special_tokens=False)
    return whole[len(before) :]


SLICE = 256
"""Tokens that are written at a time: with 20 alternatives each, two milliseconds."""


async def json_with_logprobs(
    view: BaseModel, found: Sequence[TokenLogprobs] | None, written: list[bytes] | None = None
) -> bytes:
    """The JSON of `view`, whose own `logprobs` are None, with those that were `found` in their place. Without any there
    is no such field.

    `written` gets each whole slice, and the next answer that tells of the same and more takes it from there.
    """
    text = view.model_dump_json().encode()
    if found is None:
        return text
    parts = [] if written is None else written[:]
    for first in range(len(parts) * SLICE, len(found), SLICE):
        if first:
            await asyncio.sleep(0)
        tokens = found[first : first + SLICE]
        parts.append(orjson.dumps(_plain(tokens))[1:-1])
        if written is not None and len(tokens) == SLICE and len(written) < len(parts):
            written.append(parts[-1])  # unless another answer has done so meanwhile
    return b'%b,"logprobs":[%b]}' % (text[:-1], b",".join(parts))


def _plain(found: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": each.token_id,
            "logprob": each.logprob,
            "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in each.top],
        }
        for each in found
    ]


TURN_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The turn; with `stream`, `token` events, then one event `finished`, `paused` or `error`.",
        "content": {EventStream.media_type: {"schema": component(TurnEvent)}},
    },
    500: {"model": TurnErrorBody},
}
"""The documented answers of a route that answers with a turn, where they are not those of every route. Its model is
`TurnView`.
"""


async def answer_turn(
    request: Request, session: Session, reader: TurnReader, *, stream: bool, keyed: KeyedRequest | None = None
) -> Response:
    """Read the next stretch of the session's turn, which `keyed` has asked for. Raises `ClientDisconnect` if the
    client has gone, and `NotDurable` with the turn in it.
    """
    if stream:
        return EventStream(turn_events(session, reader, keyed))
    try:
        end = await unless_disconnected(request, reader.read())
    except NotDurable as error:
        raise await _with_turn(error, session, reader) from error
    answer = (await _turn(session, reader, end))[1]
    if keyed is not None:
        keyed.is_answered = True
    return Response(answer, media_type="application/json")


async def turn_events(
    session: Session, reader: TurnReader, keyed: KeyedRequest | None = None
) -> AsyncGenerator[bytes, None]:
    """The events of the next stretch. An error is an event too: the status has been sent."""
    try:
        async for item in reader:
            if isinstance(item, TextChunk):
                event = TokenEvent(text=item.text, token_ids=list(item.token_ids))
                found = None if reader.logprobs is None else item.logprobs
                yield sse_event("token", await json_with_logprobs(event, found))
            elif isinstance(item, Reading):
                name, reading = event_of(item)
                yield sse_event(name, reading.model_dump_json().encode())
            elif isinstance(item, Paused | TurnFinished):
                event_of_end = sse_event(*await _turn(session, reader, item))
                if keyed is not None:
                    keyed.is_answered = True
                yield event_of_end
    except NotDurable as error:
        yield sse_event("error", body_of(await _with_turn(error, session, reader)))
    except Exception as error:
        yield sse_event("error", body_of(error))


async def _with_turn(error: NotDurable, session: Session, reader: TurnReader) -> NotDurable:
    """The error with the turn's answer: the session has it, so the client must not ask for it again."""
    if reader.finished is None:
        return error
    _, turn = await _turn(session, reader, reader.finished)
    return NotDurable(error.reason, done="the turn is done, but a restart would undo it", turn=orjson.loads(turn))


async def _turn(session: Session, reader: TurnReader, end: Paused | TurnFinished) -> tuple[str, bytes]:
    """The turn's status, and the JSON of its `TurnView`."""
    checkpoint = None
    if isinstance(end, Paused):
        pause = session.pause  # None, or another one, if this one is over already
        lasts = pause is not None and pause.info is end.checkpoint
        checkpoint = CheckpointView.of(end.checkpoint, pause.expires_at if pause and lasts else None)
    view = TurnView(
        status="paused" if checkpoint else "finished",
        text=reader.text,
        token_ids=reader.token_ids,
        finish_reason=None if isinstance(end, Paused) else end.reason,
        usage=end.usage,
        checkpoint=checkpoint,
        **by_kind(reader.readings),
    )
    found = None if reader.logprobs is None else tuple(reader.logprobs)
    return view.status, await json_with_logprobs(view, found, reader.written)


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
    token_ids, ends = await _encode(session, body, services)
    max_tokens = turns.room(len(session.history) + len(token_ids), body.max_tokens, param=body.input_field)
    request = TurnRequest(
        token_ids,
        sampling,
        body.to_stop_rule(max_tokens=max_tokens, eos_token_ids=services.tokens.eos_token_ids),
        body.to_text_rule(logprobs=body.logprobs),
        param=body.input_field,
        keyed=keyed,
        prefix_ends=ends,
    )
    if keyed is not None and keyed.is_left:
        raise ClientDisconnect
    return turns.start(session, request, cleanup)


async def _encode(session: Session, body: GenerateBody, services: Services) -> tuple[list[int], tuple[int, ...]]:
    """The turn's new tokens, and the lengths of their prefixes that others may share. Raises `WrongState` if the
    history has changed since the tokens were made to follow it.
    """
    session.require(SessionState.IDLE, to="start a turn")
    turn, history = session.turn, session.history[:]
    info, tokens, support = services.info, services.tokens, services.tool_support

    def encode() -> tuple[list[int], tuple[int, ...]]:
        token_ids = new_token_ids(body, tokens, history, info.vocab_size, info.max_model_len)
        if history or body.messages is None or not support.keeps_states:
            return token_ids, ()
        chat = [message.model_dump() for message in body.messages]
        text, marked = tokens.chat_text(chat), mark_instructions(chat)
        return token_ids, support.prefix_ends(text, token_ids, lambda: tokens.chat_text(marked))

    found = await services.side_work.run(session.owner, encode)
    session.require(SessionState.IDLE, to="start a turn")
    if session.turn is not turn or len(session.history) != len(history):
        raise WrongState(f"cannot start a turn: the history of session {session.id} has changed meanwhile")
    return found


resume_router = APIRouter(prefix="/v1/sessions", tags=["breakpoints"], route_class=JsonRoute)

TO_THE_NEXT_BREAKPOINT = ResumeBody()


@resume_router.post(
    "/{session_id}/resume",
    operation_id="resumeSession",
    response_model=TurnView,
    responses={**errors(400, 404, 409, 503), **TURN_RESPONSES},
)
async def resume_session(
    request: Request,
    session: SessionDep,
    services: ServicesDep,
    owner: OwnerDep,
    cleanup: CleanupDep,
    body: ResumeBody = TO_THE_NEXT_BREAKPOINT,
) -> Response:
    """Go on with a paused turn, to its next pause or its end. A client that disconnects while it runs cancels it."""
    registry, until = services.sessions, body.to_until(services.info)
    registry.pauses.check_resume(session, until)
    if body.edits is not None:
        target = checkpoint_target(services, session.require_pause(to="edit the checkpoint").info)
        await registry.whitebox.edit_checkpoint(session, await to_edits(body.edits, services, owner, target))
    try:
        reader = registry.pauses.resume(session, until)
    except (Draining, Moving) as error:  # a retry of the whole request would edit it twice
        if body.edits is None:
            raise
        raise WrongState(
            f"the edits are made, but the turn is not resumed: {error.message}; resume it alone"
        ) from error
    cleanup.callback(registry.pauses.release, session, reader.turn)
    return await answer_turn(request, session, reader, stream=body.stream)
