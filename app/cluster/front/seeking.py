"""Finds sessions that a replica has handed on before it went away: whoever has one now says so itself."""

from __future__ import annotations

import asyncio

from starlette.types import Scope

from app.cluster.fleet import OWN_NAME, Fleet, Replica, State
from app.cluster.front.fetch import Fetched, fetch
from app.cluster.front.heads import bodiless, moved_to, not_done
from app.cluster.front.pool import Pool
from app.cluster.front.routes import SESSIONS

PATIENCE_S = 3.0
"""How long a replica may take to say whether it has a session."""


class Seeker:
    """Asks all replicas that answer, as the client that wants the session. Used on the event loop only."""

    def __init__(self, fleet: Fleet, pool: Pool) -> None:
        self._fleet = fleet
        self._pool = pool

    async def find(self, session_id: str, scope: Scope) -> Replica | None:
        """Who has the session, for the client whose request has that `scope`. None: none of those that answer."""
        path, headers = f"{SESSIONS}/{session_id}".encode(), bodiless(scope, OWN_NAME)
        asked = [
            fetch(self._pool, each, path, headers, PATIENCE_S) for each in self._fleet if each.state is not State.AWAY
        ]
        told = await asyncio.gather(*asked, return_exceptions=True)
        names = [self._home(each) for each in told if isinstance(each, Fetched)]
        return next((each for each in names if each is not None and each.state is not State.AWAY), None)

    def _home(self, told: Fetched) -> Replica | None:
        """Where the session is by what one replica says."""
        if told.status == 200 or not_done(told.headers) == "moving":
            return told.replica
        return self._fleet.find(moved_to(told.headers))
