"""Prompts that one server of a cluster computes for another, so that they do not delay the sessions that decode there.

A server with the role `decode` offers its long prompts to one with the role `prefill`. No turn fails because of that:
whatever does not arrive is computed at home.
"""

import asyncio
import contextlib
import logging
import socket
from array import array
from collections.abc import Mapping
from functools import partial

import msgspec

from app.cluster.fleet import Replica
from app.cluster.hop import SHUNNED_S, Hops
from app.cluster.moves.talk import PREFIX, Take, Way, connect, give, model_of, send
from app.domain.errors import DjinnError, PeerAway, PeerFull, PeerMismatch, WrongState
from app.domain.homes import new_session_id
from app.domain.tasks import Tasks
from app.domain.values import SamplingParams, StopRule
from app.messages import Close, ComputePrompt, Lacking, Open, ReceivedPrompt, ReceivePrompt, SendPrompt, SentKV, Submit
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.settings import Settings

logger = logging.getLogger(__name__)
FORMAT = 4
"""The version of `PromptOffer`, raised whenever the meaning of anything in it changes."""
PROMPT = f"{PREFIX}prompt"
DECODE, PREFILL = "decode", "prefill"
OFFER_S = 2.0
"""How long another server may take to say whether it computes a prompt: the turn waits for that too."""
AT_ONCE = 16
"""How many prompts may wait or be computed here. A further one is computed sooner at its home."""
GREEDY, NO_TOKENS = SamplingParams(seed=0, temperature=0), StopRule(0)
GO = b"g"
"""What the home sends once it has taken the connection from its HTTP client. Until then it gets nothing."""


class PromptOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt whose KV is to come over the connection, from the block with the number `first` on. Closing the
    connection cancels it.

    `source` is the server that asks. `namespace` is None if the session has that of its tenant: then other sessions may
    use what is computed for it. `token_ids` are those of the whole prompt, as the journal has them.
    """

    format: int = FORMAT
    source: str
    model: dict[str, int | str]
    block_size: int
    tenant: str
    namespace: str | None
    token_ids: bytes
    first: int


class Prefill:
    """Asks for prompts, computes them, or does neither, depending on the server's role. Used on the event loop only."""

    def __init__(self, registry: SessionRegistry, hops: Hops, settings: Settings) -> None:
        self._registry, self._settings = registry, settings
        self._metrics = registry.metrics.prompts
        self._hops, self._fleet = hops, hops.fleet
        self._model = model_of(registry.executor.engine.info)
        self.tasks = Tasks()
        """Prompts of others that wait or are computed here, or own ones that others compute."""
        self.ways: Mapping[str, Way] = {PROMPT: (PromptOffer, self.offer)}
        """What other servers may offer, by path."""
        if settings.role == DECODE:  # the engine asks for long prompts
            registry.turns.apart_tokens = lambda: 0 if self._best() is None else settings.prefill_apart_tokens
            registry.table.on_lacking = lambda session, notice: self.tasks.start(self._have_computed(session, notice))

    def _best(self) -> Replica | None:
        """The server with the fewest turns of those that compute prompts."""
        found = [each for each in self._fleet.ready if each.seen.role == PREFILL]
        return min(found, key=lambda each: each.seen.load.turns + each.placed, default=None)

    async def _have_computed(self, session: Session, notice: Lacking) -> None:
        executor, number = self._registry.executor, None
        try:
            number = give(executor, await self._offer(session, notice))
        except (DjinnError, OSError) as error:  # a timeout too
            logger.warning("a prompt is computed here: %s", error or "no other replica accepted it in time")
            self._metrics.asked(whole=False, tokens=0)
            return
        finally:
            if number is None and executor.failure is None:  # else the engine that waited is gone, and the turn with it
                executor.post(partial(ComputePrompt, session=session.id, turn=notice.turn))
        come = partial(ReceivePrompt, session=session.id, turn=notice.turn, connection=number, first=notice.first)
        try:
            received: ReceivedPrompt = await executor.call(come)
        except DjinnError as error:
            received = ReceivedPrompt(0, error.message)
        if received.error is not None:
            logger.warning("the rest of a prompt is computed here: %s", received.error, extra={"session": session.id})
        self._metrics.asked(whole=received.error is None, tokens=received.tokens)

    async def _offer(self, session: Session, notice: Lacking) -> socket.socket:
        """Offer the prompt. Returns the connection on which its KV will come. Raises `DjinnError` and `OSError`."""
        replica, turn = self._best(), session.turn
        if replica is None:
            raise PeerAway("no server that computes prompts is there any more")
        if turn is None or turn.ticket != notice.turn or turn.ended.is_set():
            raise WrongState("its turn has ended")
        offer = PromptOffer(
            source=self._fleet.here,
            model=self._model,
            block_size=self._settings.block_size,
            tenant=session.owner or "",
            namespace=session.namespace,
            token_ids=session.history[: session.prompt_tokens].tobytes(),
            first=notice.first,
        )
        replica.placed += 1
        try:
            async with asyncio.timeout(OFFER_S):
                connection, _ = await connect(self._hops, replica, PROMPT, offer)
        except (PeerAway, TimeoutError):
            replica.shun(SHUNNED_S)
            raise
        return send(connection, GO)

    async def offer(self, offer: PromptOffer, take: Take) -> None:
        """Compute a prompt, without waiting. Raises `DjinnError`, `ValueError`, `OSError`."""
        if self._settings.role != PREFILL:
            raise PeerMismatch("this server computes no prompts for others: its role is not prefill")
        if (offer.format, offer.model, offer.block_size) != (FORMAT, self._model, self._settings.block_size):
            raise PeerMismatch("the prompt is for another version, model or size of blocks than this server has")
        if len(self.tasks) >= AT_ONCE:
            raise PeerFull(f"{AT_ONCE} prompts wait here")
        self._registry.table.require_no_drain()
        self._registry.executor.check()
        tokens = tuple(array("I", offer.token_ids))
        self.tasks.start(self._serve(offer, tokens, take("computed")))

    async def _serve(self, offer: PromptOffer, tokens: tuple[int, ...], connection: socket.socket) -> None:
        """Have the engine compute the prompt without its last token, whose logits the home computes, and send it."""
        executor, session = self._registry.executor, new_session_id(self._fleet.here)
        try:
            with contextlib.ExitStack() as ends:
                ends.callback(connection.close)
                connection.setblocking(False)
                async with asyncio.timeout(OFFER_S):
                    if await asyncio.get_running_loop().sock_recv(connection, 1) != GO:
                        raise ConnectionError("the other server has gone")
                ends.pop_all()  # the engine's from here on
            number = give(executor, connection)
            executor.post(partial(Open, session=session, tenant=offer.tenant, namespace=offer.namespace))
            turn = partial(Submit, session=session, token_ids=tokens[:-1], sampling=GREEDY, stop=NO_TOKENS)
            executor.start_turn(turn, lambda event: None)
            send = partial(SendPrompt, session=session, connection=number, first=offer.first)
            sent: SentKV = await executor.call(send)
            self._metrics.served(sent.computed_tokens)
        except (DjinnError, OSError) as error:
            logger.info("a prompt of %s was not computed to its end: %s", offer.source, error)
        finally:
            if executor.failure is None:
                executor.post(partial(Close, session=session))
