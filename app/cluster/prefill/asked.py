"""Prompts that other servers compute for this one. No turn fails for them: what does not come is computed here."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from typing import Any

from app.cluster.fleet import Replica, State
from app.cluster.front.look import INTERVAL_S
from app.cluster.moves.calls import PeerCalls
from app.cluster.moves.giving import give
from app.cluster.moves.outlook import Outlook
from app.cluster.moves.peers import Peer
from app.cluster.prefill.wire import FORMAT, PROMPT, Form, PromptOffer, encode_prompt
from app.domain.errors import DjinnError, PeerAway, WrongState
from app.messages import ComputePrompt, Lacking, ReceivedPrompt, ReceivePrompt
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session

logger = logging.getLogger(__name__)

OFFER_S = 2.0
"""How long another server may take to say whether it computes a prompt: the turn waits for that too."""
PREFILL = "prefill"


class PromptsAsked:
    """Finds servers that compute prompts, and has the engine receive what they send. Used on the event loop only."""

    def __init__(
        self, registry: SessionRegistry, here: str, form: Form, calls: PeerCalls, outlook: Outlook, *, least: int
    ) -> None:
        """`here` is the server's own name, and `form` what it needs of others. `least`: tokens of a long prompt."""
        self._registry = registry
        self._metrics = registry.metrics.prompts
        self._here = here
        self._calls = calls
        self._least = least
        self._form = form
        self._outlook = outlook
        self._under_way = set[asyncio.Task[None]]()

    def start(self) -> None:
        """Look for servers that compute prompts, and have the engine ask."""
        self._registry.turns.apart_tokens = self.apart_tokens
        self._registry.table.on_lacking = self._lacking
        self._start(self._look())

    def apart_tokens(self) -> int:
        """How many tokens without KV make a prompt that another server may compute; 0: none does."""
        return self._least if self._best() is not None else 0

    async def close(self) -> None:
        """Stop what is under way."""
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)
        self._outlook.close()
        self._calls.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _look(self) -> None:
        while True:
            await self._outlook.look()
            await asyncio.sleep(INTERVAL_S)

    def _best(self) -> Replica | None:
        """The server with the fewest turns of those that compute prompts."""
        found = [each for each in self._outlook.ready if each.load and each.load.role == PREFILL]
        return min(found, key=lambda each: each.load.turns + each.placed if each.load else 0, default=None)

    def _lacking(self, session: Session, notice: Lacking) -> None:
        self._start(self._have_computed(session, notice))

    async def _have_computed(self, session: Session, notice: Lacking) -> None:
        executor, number = self._registry.executor, None
        try:
            number = give(executor, await self._offer(session, notice))
        except (DjinnError, OSError, TimeoutError) as error:
            logger.warning("a prompt is computed here: %s", error or "no other replica accepted it in time")
            self._metrics.asked(whole=False, tokens=0)
        finally:
            if number is None and executor.failure is None:  # else the engine that waited is gone, and the turn with it
                executor.post(lambda ticket: ComputePrompt(ticket, session.id, notice.turn))
        if number is None:
            return
        try:
            received: ReceivedPrompt = await executor.call(
                lambda ticket: ReceivePrompt(ticket, session.id, notice.turn, number, notice.first)
            )
        except DjinnError as error:
            received = ReceivedPrompt(0, error.message)
        if received.error is not None:
            logger.warning("the rest of a prompt is computed here: %s", received.error, extra={"session": session.id})
        self._metrics.asked(whole=received.error is None, tokens=received.tokens)

    async def _offer(self, session: Session, notice: Lacking) -> socket.socket:
        """The connection on which the prompt will come. Raises `DjinnError`, `TimeoutError`, `OSError`."""
        replica, turn = self._best(), session.turn
        if replica is None:
            raise PeerAway("no server that computes prompts is there any more")
        if turn is None or turn.ticket != notice.turn or turn.ended.is_set():
            raise WrongState("its turn has ended")
        offer = PromptOffer(
            format=FORMAT,
            source=self._here,
            form=self._form,
            tenant=session.owner or "",
            namespace=session.namespace,
            token_ids=session.history[: session.prompt_tokens].tobytes(),
            first=notice.first,
        )
        replica.placed += 1
        try:
            async with asyncio.timeout(OFFER_S):
                connection, _ = await self._calls.connect(Peer(replica.name, replica.url), PROMPT, encode_prompt(offer))
        except (PeerAway, TimeoutError):
            replica.told(State.AWAY, None)  # until the next look has found it
            raise
        return connection
