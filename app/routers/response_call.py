"""From a checked request to a response that is generated."""

import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

from app.domain.errors import ContextTooLong, Draining, FieldOutOfRange, MalformedRequest, Moved, WrongState
from app.domain.homes import new_response_id
from app.domain.values import FinishReason
from app.messages import Reading, Started, TurnFinished
from app.openai.chat import chat_prompt
from app.openai.models import tokenized_limit
from app.openai.response import UNDER_WAY, Conversation, ResponseObject, StoredResponse, check_calls, to_chat
from app.openai.response_events import Event, ResponseWriter
from app.openai.response_input import ENCRYPTED, CompactBody, CountBody, ResponseBody
from app.openai.response_items import AnyItem, CallItem, CallOutputItem
from app.openai.response_store import UnstoredConversation
from app.routers.api_calls import ApiCall
from app.routers.dependencies import Services
from app.sessions.named import IDLE_TTL_S
from app.sessions.session import OF_RESPONSES, UNNAMED, Session
from app.sessions.table import holding
from app.text.generation import TextChunk, TurnReader
from app.text.tokenizer import TextLimit
from app.tools.definitions import ToolUse
from app.tools.reader import Answer
from app.tools.replay import ChatPrompt
from app.wire.turns import Djinn


class ResponseRun:
    """Reads the turn of a response. However it ends, the response is over and kept afterwards."""

    def __init__(
        self,
        services: Services,
        stored: StoredResponse,
        reader: TurnReader,
        writer: ResponseWriter,
        answer: Answer,
        cleanup: AsyncExitStack,
        left_out: int = 0,
    ) -> None:
        self._services = services
        self.left_out = left_out
        """The oldest items of the conversation that its prompt lacks."""
        self.stored = stored
        self._reader = reader
        self._answer = answer
        self._writer = writer
        self._cleanup = cleanup
        self.error: Exception | None = None
        """Why the response failed."""
        self._is_kept = False
        conversation = stored.conversation
        conversation.is_running = True
        if conversation.is_kept:
            services.responses.begin(stored, reader.turn)
        cleanup.callback(self._abandon)

    @property
    def response(self) -> ResponseObject:
        """The response so far."""
        return self._writer.response

    @property
    def session(self) -> Session | None:
        """The session of a response that is kept."""
        conversation = self.stored.conversation
        return conversation.session if conversation.is_kept or not conversation.owns_session else None

    async def events(self) -> AsyncGenerator[Event, None]:
        """All events. The last comes when the response is durable; with it the session is free for the next one."""
        try:
            for event in self._writer.begin():
                yield event
            async for item in self._reader:
                if isinstance(item, Started):
                    for event in self._writer.start():
                        yield event
                elif isinstance(item, TextChunk):
                    for event in self._writer.write(item):
                        yield event
                elif isinstance(item, Reading):
                    self._writer.read(item)
                elif isinstance(item, TurnFinished):
                    if item.reason is FinishReason.CANCELLED and self._services.sessions.table.draining:
                        error = Draining("the server is shutting down; the turn was cancelled")
                        error.headers = {}  # a part of it was done
                        raise error
                    for event in self._writer.finish(item):
                        yield event
            services, session, calls = self._services, self.stored.conversation.session, self._answer.calls
            if self.response.status == "completed" and calls and services.settings.park_on_tool_calls:
                services.sessions.wait_for_tools(session, self._reader.turn, calls)
            self._keep()
            await self._cleanup.aclose()
            await services.responses.settled(self.stored)
        except Exception as error:
            self.error = error
            self._writer.fail(error)
            await self._cleanup.aclose()
        yield self._writer.last()

    def _abandon(self) -> None:
        """The response has no more readers. If it is over, there is nothing to do."""
        if self.response.status in UNDER_WAY:
            self._writer.cancel()
        self._keep()

    def _keep(self) -> None:
        conversation = self.stored.conversation
        if self._is_kept:
            return
        self._is_kept = True
        conversation.is_running = False
        if conversation.is_kept:
            self._services.responses.keep(self.stored)
        else:
            conversation.add(self.stored)


@dataclass(slots=True)
class Asked:
    """What a call asks for, as the model reads it."""

    model: str
    """The name that answers tell."""
    before: list[AnyItem]
    """The items of the conversation that it goes on with."""
    new: list[AnyItem]
    use: ToolUse
    budget: int | None
    """Tokens after which thoughts end."""
    prompt: ChatPrompt
    left_out: int
    """The oldest items that the prompt lacks."""


async def asked_of(call: ApiCall, unstored: UnstoredConversation, body: ResponseBody) -> Asked:
    """Read a call, and make its prompt. The conversation that it goes on after stays until the `cleanup` unwinds.

    Raises `UnknownModel`, `NotFound`, `FieldOutOfRange`, `MalformedRequest`, `ContextTooLong`.
    """
    services = call.services
    support = services.tool_support
    seal = support.seal.of(call.owner)
    heeded = support.heed(body.wish())
    call.ignored.read(body)
    call.ignored.add(heeded.ignored)
    call.ignored.add(body.without_thoughts(support, seal))
    info = call.choose(None if isinstance(body, CountBody) and not body.model else body.model)
    previous = _previous(call, unstored, body)
    if previous is not None:
        call.cleanup.enter_context(holding(previous.conversation.session))
    before = [] if previous is None else previous.context
    new = body.items(lambda item_id: services.responses.find_item(call.owner, item_id), seal)
    check_calls(before, new)
    if body.conversation is not None and previous is not None:
        previous.conversation.check_not_removed(new)
    use = body.to_tool_use()
    make = prompt_with_room if isinstance(body, CompactBody) else prompt_of
    items, variables = [*before, *new], heeded.variables
    prompt, left_out = await services.side_work.run(call.owner, make, services, body, items, use, variables)
    prompt = await call.go_on(body, prompt, None if previous is None else previous.conversation.session)
    return Asked(info.name, before, new, use, heeded.budget, prompt, left_out)


async def start_response(call: ApiCall, unstored: UnstoredConversation, body: ResponseBody) -> ResponseRun:
    """Submit the turn of a response; it ends when the call's `cleanup` unwinds.

    Raises `UnknownModel`, `NotFound`, `FieldOutOfRange`, `MalformedRequest`, `ContextTooLong`, `Busy`, `Draining`,
    `WrongState` if the session that `X-Session-ID` names is in use, and `Moved` if it is on another server.
    """
    services, cleanup = call.services, call.cleanup
    support, length = services.tool_support, services.info.max_model_len
    asked = await asked_of(call, unstored, body)
    before, new, use, prompt = asked.before, asked.new, asked.use, asked.prompt
    if isinstance(body, CompactBody) and body.max_output_tokens is None:
        limit = min(MAX_SUMMARY, length // 4, length - len(prompt.token_ids))
        body = body.model_copy(update={"max_output_tokens": limit})
        asked.budget = asked.budget or (limit // 2 if support.has_budget else None)
    (request,) = await call.requests(
        body,
        [prompt.token_ids],
        use,
        opening=prompt.opening,
        budget=asked.budget,
        keyed=call.keyed,
        prefix_ends=prompt.prefix_ends,
    )
    await call.meet_busy([prompt.token_ids])
    response_id = new_response_id(services.settings.replica)
    response = ResponseObject.begin(body, request.sampling, response_id, int(time.time()))
    response.model = asked.model
    if prompt.recomputed_because is not None:
        response.djinn = Djinn(recomputed_because=prompt.recomputed_because)
    if call.keyed is not None:
        call.keyed.response = response_id
    # From here on nothing waits, so no other call takes the session. A refused call closes none.
    (charge,) = services.sessions.turns.reserve(call.owner, [request], cleanup)
    with ExitStack() as undo:
        previous = _previous(call, unstored, body)  # which may have changed meanwhile
        if [each.id for each in before] != [each.id for each in ([] if previous is None else previous.context)]:
            raise WrongState("the conversation has other items than when the response was asked for: ask again")
        conversation = _conversation(call, body, previous, response.id, before, prompt.token_ids, undo)
        cleanup.enter_context(holding(conversation.session))  # until the response is kept
        reader = services.sessions.turns.start(conversation.session, request, cleanup, charge)
        undo.pop_all()
    if not conversation.is_kept:
        unstored.take(conversation)
    is_unseen = conversation.is_kept and not body.store
    stored = StoredResponse(conversation, len(conversation.items), new, response, is_unseen)
    streams = body.stream or body.background or call.stays_connected
    answer = support.answer(use, has_form=body.to_grammar() is not None, opening=prompt.opening, streams=streams)
    writer = ResponseWriter(
        response,
        services.tokens,
        answer,
        {each.tool.name: each for each in body.offered},
        generates=body.generate,
        as_summary=body.asks_for_summary,
        seal=support.seal.of(call.owner) if ENCRYPTED in body.include else None,
    )
    return ResponseRun(services, stored, reader, writer, answer, cleanup, asked.left_out)


def _previous(call: ApiCall, unstored: UnstoredConversation, body: ResponseBody) -> StoredResponse | None:
    name = "previous_response_id"
    if body.conversation is not None:
        if body.previous_response_id is not None:
            raise FieldOutOfRange.at("conversation", f"give it or {name}, not both")
        head = call.services.responses.find_conversation(call.owner, body.conversation.id, param="conversation")
        head.conversation.require_rest()
        return head.conversation.latest
    if body.previous_response_id is None:
        return None
    found = unstored.find(body.previous_response_id)
    found = found or call.services.responses.find(call.owner, body.previous_response_id, param=name)
    if not found.can_continue:
        status = found.answer.status
        raise FieldOutOfRange.at(name, f"the response is {status}, and cannot be continued")
    return found


def prompt_of(
    services: Services, body: ResponseBody, items: Sequence[AnyItem], use: ToolUse, variables: Mapping[str, Any]
) -> tuple[ChatPrompt, int]:
    """The prompt of a response after these items, and how many of them it leaves out: none. Raises `MalformedRequest`,
    `FieldOutOfRange`, `ContextTooLong`.
    """
    chat = to_chat(body.instructions, items)
    try:
        support, length = services.tool_support, services.info.max_model_len
        limit = tokenized_limit("input", length) if isinstance(body, CountBody) else TextLimit("input", length)
        prompt = chat_prompt(
            chat,
            services.tokens,
            support,
            use.tools,
            add_generation_prompt=body.generate,  # the next response goes on with other items
            variables=variables,
            limit=limit,
        )
        return prompt, 0
    except (MalformedRequest, FieldOutOfRange) as error:  # its messages came as items
        raise type(error)(error.message.replace("messages.", "message ", 1), param="input") from error


MIN_SUMMARY = 1024
"""Tokens for which a prompt leaves room that asks for a summary, if the call does not say how many."""
MAX_SUMMARY = 4096
"""Those that such a summary has at most, with the thoughts before it: models of few words would go on to the end of the
context. Half of them are for the thoughts.
"""


def prompt_with_room(
    services: Services, body: ResponseBody, items: Sequence[AnyItem], use: ToolUse, variables: Mapping[str, Any]
) -> tuple[ChatPrompt, int]:
    """The same for a summary, whose last item asks for it. If the context has no room for all items and the summary,
    the oldest are left out.
    """
    length, last = services.info.max_model_len, len(items) - 1
    room = min(body.max_output_tokens, length // 2) if body.max_output_tokens else min(MIN_SUMMARY, length // 4)

    @cache
    def made(first: int) -> ChatPrompt | None:
        try:
            prompt, _ = prompt_of(services, body, _items_from(items, first), use, variables)
        except MalformedRequest as error:  # a template may not begin with every item
            if first == last or not (first or isinstance(error, ContextTooLong)):
                raise
            return None
        return prompt if first == last or len(prompt.token_ids) + room <= length else None

    first = bisect_left(range(last), True, key=lambda first: made(first) is not None)
    prompt = made(first)
    assert prompt is not None
    return prompt, first


def _items_from(items: Sequence[AnyItem], first: int) -> list[AnyItem]:
    """The items from that one on, without outputs whose calls come before it."""
    called = {item.call_id for item in items[:first] if isinstance(item, CallItem)}
    return [item for item in items[first:] if not (isinstance(item, CallOutputItem) and item.call_id in called)]


def _conversation(
    call: ApiCall,
    body: ResponseBody,
    previous: StoredResponse | None,
    new_name: str,
    before: list[AnyItem],
    prompt: list[int],
    undo: ExitStack,
) -> Conversation:
    """The conversation that the response goes on with: the previous response's if that is at its end, else a new one
    with the same items. `undo` gets what is to be done about it if the turn cannot start.
    """
    named = None if call.is_aside else _named_session(call, previous)
    if previous is not None:
        # It may leave, and the next response with it.
        call.services.sessions.table.require_no_drain(previous.conversation.session)
        going_on = previous.conversation
        is_there = call.session_name is None or call.is_aside or named is going_on.session
        if body.conversation is not None and not isinstance(body, CompactBody):
            call.services.sessions.give_model(going_on.session, call.adapter)
            if not is_there:
                raise FieldOutOfRange.at("conversation", "it is in another session than X-Session-ID")
            return going_on
        is_free = going_on.head is None and going_on.goes_on_after(previous)
        if going_on.is_kept is body.store and is_there and is_free and going_on.session.is_of(call.adapter):
            if going_on.session.name == UNNAMED:
                call.services.bound_sessions.adopt(going_on.session)
            return going_on
    session = named or _open(call, body, prompt, undo)
    owns = (call.session_name is None or call.is_aside) and session.name != UNNAMED
    return Conversation(new_name, session, is_kept=body.store, owns_session=owns, items=list(before))


def _named_session(call: ApiCall, previous: StoredResponse | None) -> Session | None:
    try:
        return call.named_session()
    except Moved as error:
        if previous is None:
            raise
        raise WrongState(
            "the session that X-Session-ID names is on another server than the response of previous_response_id: "
            "give only one of them"
        ) from error


def _open(call: ApiCall, body: ResponseBody, prompt: list[int], undo: ExitStack) -> Session:
    """The session for the response: a new one, or for a response that is not stored the session that it continues."""
    services, metadata = call.services, call.labels(body, body.user)
    if call.session_name is not None and not call.is_aside:
        session = services.bound_sessions.open(call.owner, call.session_name, metadata=metadata, adapter=call.adapter)
    elif body.store:
        session = services.sessions.create(
            call.owner, metadata=metadata, ttl_s=IDLE_TTL_S, name=OF_RESPONSES, adapter=call.adapter
        )
    elif call.binds:
        bound = services.bound_sessions
        found = bound.find_continued(call.owner, prompt, metadata, call.adapter)
        if found is not None:
            return found
        session = bound.open_unnamed(call.owner, call.cleanup, metadata=metadata, adapter=call.adapter)
        if call.stays_connected:
            session.expect()
    else:
        session = services.sessions.create(call.owner, metadata=metadata, ephemeral=True, adapter=call.adapter)
    undo.callback(services.sessions.drop, session)
    return session
