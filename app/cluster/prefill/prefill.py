"""One server's part in prompts that are computed apart."""

from __future__ import annotations

from collections.abc import Mapping

from app.cluster.moves.calls import PeerCalls
from app.cluster.moves.cluster import Membership
from app.cluster.moves.doors import Way
from app.cluster.moves.outlook import Outlook
from app.cluster.moves.wire import Model
from app.cluster.prefill.asked import PREFILL, PromptsAsked
from app.cluster.prefill.served import PromptsServed
from app.cluster.prefill.wire import PROMPT, Form
from app.sessions.registry import SessionRegistry
from app.settings import Settings

DECODE = "decode"


class Prefill:
    """Asks for prompts, or computes them, or does neither. Used on the event loop only."""

    def __init__(self, registry: SessionRegistry, member: Membership, settings: Settings) -> None:
        self._asks = settings.role == DECODE
        form = Form(Model.of(registry.executor.engine.info), settings.block_size, settings.prefill_transport)
        self._served = PromptsServed(registry, member.here, form, is_asked=settings.role == PREFILL)
        self._asked = PromptsAsked(
            registry,
            member.here,
            form,
            PeerCalls(member.key),
            Outlook(member.here, member.peers, member.host, member.key),
            least=settings.prefill_apart_tokens,
        )
        self.ways: Mapping[str, Way] = {PROMPT: self._served}
        """What other servers may offer, by path."""

    def start(self) -> None:
        """Look for servers that compute prompts, if this one asks any."""
        if self._asks:
            self._asked.start()

    async def close(self) -> None:
        """Stop what is under way."""
        await self._asked.close()
        await self._served.close()
