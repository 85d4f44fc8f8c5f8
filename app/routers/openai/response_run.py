"""One response while it is generated."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

from app.domain.errors import Draining
from app.domain.values import FinishReason
from app.messages import TurnFinished
from app.openai.responses.conversation import StoredResponse
from app.openai.responses.events import ResponseWriter
from app.openai.responses.output import Event
from app.openai.responses.response import ResponseObject
from app.routers.dependencies import Services
from app.sessions.session import Session
from app.text.generation import TextChunk, TurnReader


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
            services.tool_waits.begin(services.sessions, session, self._reader.turn, self._writer.called)

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
