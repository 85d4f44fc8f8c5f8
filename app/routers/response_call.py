"""From a checked request to a response that is generated."""

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace

from app.domain.errors import DjinnError, Draining, FieldOutOfRange, MalformedRequest, Moved, WrongState
from app.domain.homes import new_response_id
from app.domain.values import FinishReason, StopRule
from app.messages import TurnFinished
from app.openai.chat_prompt import chat_prompt
from app.openai.response import Conversation, ResponseObject, StoredResponse, check_calls, to_messages
from app.openai.response_events import Event, ResponseWriter
from app.openai.response_input import ResponseBody
from app.openai.response_items import AnyItem
from app.openai.response_store import UnstoredConversation
from app.routers.dependencies import Services
from app.routers.openai import check_model
from app.sessions.keyed import KeyedRequest
from app.sessions.named import IDLE_TTL_S
from app.sessions.session import OF_RESPONSES, Session
from app.sessions.table import holding
from app.sessions.turns import TurnRequest
from app.text.generation import TextChunk, TurnReader
from app.text.tokenizer import TextLimit
from app.tools.definitions import ToolUse
from app.tools.support import turn_grammar
from app.wire.extras import IgnoredFields


class ResponseRun:
    """Reads the turn of a response. However it ends, the response is over and kept afterwards."""

    def __init__(
        self,
        services: Services,
        stored: StoredResponse,
        reader: TurnReader,
        writer: ResponseWriter,
        cleanup: AsyncExitStack,
    ) -> None:
        self._services = services
        self._stored = stored
        self._reader = reader
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
        conversation = self._stored.conversation
        return conversation.session if conversation.is_kept or not conversation.owns_session else None

    async def events(self) -> AsyncGenerator[Event, None]:
        """All events. The last comes when the response is durable; with it the session is free for the next one."""
        try:
            for event in self._writer.begin():
                yield event
            async for item in self._reader:
                if isinstance(item, TextChunk):
                    for event in self._writer.write(item):
                        yield event
                elif isinstance(item, TurnFinished):
                    self._require_no_drain(item)
                    for event in self._writer.finish(item):
                        yield event
            self._wait_for_tools()
            await self._end()
        except Exception as error:
            self.error = error
            self._writer.fail(error)
            await self._cleanup.aclose()
        yield self._writer.last()

    def _require_no_drain(self, finished: TurnFinished) -> None:
        if finished.reason is FinishReason.CANCELLED and self._services.sessions.table.draining:
            error = Draining("the server is shutting down; the turn was cancelled")
            error.headers = {}  # a part of it was done
            raise error

    def _wait_for_tools(self) -> None:
        """The session of a response that calls functions waits until the next response."""
        is_waiting = self.response.status == "completed" and bool(self._writer.called)
        services, session = self._services, self._stored.conversation.session
        if is_waiting and services.settings.park_on_tool_calls:
            services.sessions.wait_for_tools(session, self._reader.turn, self._writer.called)

    async def _end(self) -> None:
        self._keep()
        await self._cleanup.aclose()
        await self._services.responses.settled(self._stored)

    def _abandon(self) -> None:
        """The response has no more readers. If it is over, there is nothing to do."""
        if self.response.status == "in_progress":
            self._writer.cancel()
        self._keep()

    def _keep(self) -> None:
        conversation = self._stored.conversation
        if self._is_kept:
            return
        self._is_kept = True
        conversation.is_running = False
        if conversation.is_kept:
            self._services.responses.keep(self._stored)
        else:
            conversation.add(self._stored)


class ResponseCall:
    """Starts responses of one caller: one over HTTP, one after the other over a WebSocket."""

    def __init__(
        self,
        services: Services,
        owner: str | None,
        unstored: UnstoredConversation,
        session_name: str | None = None,
        keyed: KeyedRequest | None = None,
    ) -> None:
        """`session_name` is what `X-Session-ID` says, and `keyed` what `Idempotency-Key` does."""
        self._services = services
        self._owner = owner
        self._unstored = unstored
        self._session_name = session_name
        self._keyed = keyed

    async def start(self, body: ResponseBody, ignored: IgnoredFields, cleanup: AsyncExitStack) -> ResponseRun:
        """Submit the turn; it ends when `cleanup` unwinds.

        Raises `UnknownModel`, `NotFound`, `FieldOutOfRange`, `MalformedRequest`, `ContextTooLong`, `Busy`, `Draining`,
        `WrongState` if the session that `X-Session-ID` names is in use, and `Moved` if it is on another server.
        """
        services = self._services
        ignored.read(body)
        check_model(services, body.model)
        before, new = self._items(body, cleanup)
        use, support = body.to_tool_use(), services.tool_support
        token_ids = await services.side_work.run(self._owner, self._prompt, body, [*before, *new], use)
        request = await self._request(body, token_ids, use, cleanup)
        response_id = new_response_id(services.settings.replica)
        response = ResponseObject.begin(body, request.sampling, response_id, int(time.time()))
        if self._keyed is not None:
            self._keyed.response = response_id
        # From here on nothing waits, so no other call takes the session. A refused call closes none.
        (charge,) = services.sessions.turns.reserve(self._owner, [request], cleanup)
        with ExitStack() as undo:
            conversation = self._conversation(body, response.id, before, undo)
            cleanup.enter_context(holding(conversation.session))  # until the response is kept
            reader = services.sessions.turns.start(conversation.session, request, cleanup, charge)
            undo.pop_all()
        if not conversation.is_kept:
            self._unstored.take(conversation)
        stored = StoredResponse(conversation, len(before), new, response)
        writer = ResponseWriter(response, services.tokens, support.reader(use, has_form=body.to_grammar() is not None))
        return ResponseRun(services, stored, reader, writer, cleanup)

    def _items(self, body: ResponseBody, cleanup: AsyncExitStack) -> tuple[list[AnyItem], list[AnyItem]]:
        """Those of the conversation so far, whose session stays until `cleanup` unwinds, and those of the request."""
        previous = self._previous(body)
        if previous is not None:
            cleanup.enter_context(holding(previous.conversation.session))
        before = [] if previous is None else previous.context
        new = body.items(lambda item_id: self._services.responses.find_item(self._owner, item_id))
        check_calls(before, new)
        return before, new

    def _previous(self, body: ResponseBody) -> StoredResponse | None:
        name = "previous_response_id"
        if body.previous_response_id is None:
            return None
        found = self._unstored.find(body.previous_response_id)
        found = found or self._services.responses.find(self._owner, body.previous_response_id, param=name)
        if not found.can_continue:
            status = found.answer.status
            raise FieldOutOfRange(f"{name}: the response is {status}, and cannot be continued", param=name)
        return found

    def _prompt(self, body: ResponseBody, items: list[AnyItem], use: ToolUse) -> list[int]:
        messages = to_messages(body.instructions, items)
        try:
            limit = TextLimit("input", self._services.info.max_model_len)
            tokens, support = self._services.tokens, self._services.tool_support
            return chat_prompt(messages, tokens, support, use.tools, limit=limit).token_ids
        except (MalformedRequest, FieldOutOfRange) as error:
            raise _about_input(error) from error

    async def _request(
        self, body: ResponseBody, token_ids: list[int], use: ToolUse, cleanup: AsyncExitStack
    ) -> TurnRequest:
        services = self._services
        turns, support = services.sessions.turns, services.tool_support
        body.check_vocabulary(services.info.vocab_size)
        room = turns.room(len(token_ids), body.max_output_tokens, param="input", limit_param="max_output_tokens")
        grammar = turn_grammar(body.to_grammar(), use, support)
        sampling = replace(body.to_params(services.sampling, logprobs=body.alternatives), grammar=grammar)
        await turns.compile_grammar(self._owner, sampling, body.min_tokens, cleanup)
        stop: StopRule = body.to_stop_rule(max_tokens=room, eos_token_ids=services.tokens.eos_token_ids)
        shown = support.shown if use.callable else frozenset()
        text = replace(body.to_text_rule(), shown=shown)
        return TurnRequest(
            token_ids, sampling, stop, text, replace=True, pausable=False, param="input", keyed=self._keyed
        )

    def _conversation(self, body: ResponseBody, new_name: str, before: list[AnyItem], undo: ExitStack) -> Conversation:
        """The conversation that the response goes on with: the previous response's if that is at its end, else a new
        one with the same items. `undo` gets what is to be done about it if the turn cannot start.
        """
        previous = self._previous(body)
        named = self._named_session(previous)
        if previous is not None:
            # It may leave, and the next response with it.
            self._services.sessions.table.require_no_drain(previous.conversation.session)
            going_on = previous.conversation
            is_there = self._session_name is None or named is going_on.session
            if going_on.is_kept is body.store and is_there and going_on.goes_on_after(previous):
                return going_on
        session = named or self._open(body, undo)
        owns = self._session_name is None
        return Conversation(new_name, session, is_kept=body.store, owns_session=owns, items=list(before))

    def _named_session(self, previous: StoredResponse | None) -> Session | None:
        if self._session_name is None:
            return None
        try:
            return self._services.bound_sessions.find(self._owner, self._session_name)
        except Moved as error:
            if previous is None:
                raise
            raise WrongState(
                "the session that X-Session-ID names is on another server than the response of previous_response_id: "
                "give only one of them"
            ) from error

    def _open(self, body: ResponseBody, undo: ExitStack) -> Session:
        services = self._services
        labels = {} if body.user is None else {"user": body.user}
        if self._session_name is not None:
            session = services.bound_sessions.open(self._owner, self._session_name, metadata=labels)
        elif body.store:
            session = services.sessions.create(self._owner, metadata=labels, ttl_s=IDLE_TTL_S, name=OF_RESPONSES)
        else:
            session = services.sessions.create(self._owner, metadata=labels, ephemeral=True)
        undo.callback(services.sessions.drop, session)
        return session


def _about_input(error: DjinnError) -> DjinnError:
    """The refusal of a chat, whose messages came as items."""
    return type(error)(error.message.replace("messages.", "message ", 1), param="input")
