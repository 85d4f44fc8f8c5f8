"""Prompts that this server computes for others."""

from __future__ import annotations

import asyncio
import logging
import socket
from array import array
from dataclasses import dataclass
from functools import partial

from app.cluster.moves.doors import read_message
from app.cluster.moves.giving import give
from app.cluster.prefill.wire import FORMAT, Form, PromptOffer
from app.domain.errors import DjinnError, PeerFull, PeerMismatch
from app.domain.homes import new_session_id
from app.domain.values import SamplingParams, SessionId, StopRule
from app.messages import Close, Open, SendPrompt, SentKV, Submit
from app.sessions.registry import SessionRegistry

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Prompts that wait or are computed: a replica that asks for one more computes it itself, which is faster."""
NO_TOKENS = StopRule(0)


@dataclass(frozen=True, slots=True)
class OfferedPrompt:
    """One prompt that has been taken note of."""

    prompts: PromptsServed
    offer: PromptOffer
    said: str = "computed"
    """What the other server is told."""

    def begin(self, connection: socket.socket) -> None:
        """Compute it, and send what is computed over the connection."""
        self.prompts.begin(self.offer, connection)

    async def lose(self) -> None:
        """Forget it."""
        self.prompts.lose()


class PromptsServed:
    """Used on the event loop only."""

    def __init__(self, registry: SessionRegistry, here: str, form: Form, *, is_asked: bool) -> None:
        """`here` is the server's own name, and `form` what others must have alike. `is_asked`: it computes prompts for
        others at all.
        """
        self._registry = registry
        self._metrics = registry.metrics.prompts
        self._here = here
        self._is_asked = is_asked
        self._form = form
        self._count = 0
        self._under_way = set[asyncio.Task[None]]()

    async def offer(self, body: bytes) -> OfferedPrompt:
        """Take note of a prompt. Raises `PeerMismatch`, `PeerFull`."""
        offer: PromptOffer = read_message(body, PromptOffer)
        executor = self._registry.executor
        if not self._is_asked:
            raise PeerMismatch("this server computes no prompts for others: its role is not prefill")
        if (offer.format, offer.form) != (FORMAT, self._form):
            what = "version, model, size of blocks or transport"
            raise PeerMismatch(f"the prompt is for another {what} than this server has")
        if self._count >= AT_ONCE:
            raise PeerFull(f"{AT_ONCE} prompts wait here")
        try:
            self._registry.table.require_no_drain()
            executor.check()
        except DjinnError as error:
            raise PeerFull(error.message) from error
        self._count += 1
        return OfferedPrompt(self, offer)

    def begin(self, offer: PromptOffer, connection: socket.socket) -> None:
        """Compute a prompt that has been taken note of."""
        task = asyncio.create_task(self._serve(offer, connection))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def lose(self) -> None:
        """Forget a prompt that has been taken note of."""
        self._count -= 1

    async def close(self) -> None:
        """Give up all that are under way."""
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def _serve(self, offer: PromptOffer, connection: socket.socket) -> None:
        session, executor = new_session_id(self._here), self._registry.executor
        try:
            sent = await self._send(session, offer, give(executor, connection))
            self._metrics.served(sent.computed_tokens)
        except (DjinnError, OSError) as error:
            logger.info("a prompt of %s was not computed to its end: %s", offer.source, error)
        finally:
            self._count -= 1
            if executor.failure is None:
                executor.post(partial(Close, session=session))

    async def _send(self, session: SessionId, offer: PromptOffer, number: int) -> SentKV:
        """Have the engine compute the prompt, but for the token whose logits are wanted there, and send it. Raises
        `DjinnError`.
        """
        executor, tokens = self._registry.executor, array("I", offer.token_ids)
        opening = partial(Open, session=session, tenant=offer.tenant, namespace=offer.namespace)
        executor.post(opening)
        greedy = SamplingParams(seed=0, temperature=0)
        turn = partial(Submit, session=session, token_ids=tuple(tokens[:-1]), sampling=greedy, stop=NO_TOKENS)
        executor.start_turn(turn, lambda event: None)
        sending = partial(SendPrompt, session=session, connection=number, first=offer.first)
        sent: SentKV = await executor.call(sending)
        return sent
