"""Which replica owns a request.

Its method, path and body name a session or a response, and one replica has that. An id names its owner, and each
replica knows what it has, so most requests need no lookup. The former home of a session that has moved says where it is
now, and that is remembered. If that home is away, the store is asked, and then all replicas.
"""

import asyncio
import codecs
import enum
import logging
import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import orjson
from starlette.datastructures import Headers
from starlette.types import Scope

from app.cluster.fleet import Replica, State
from app.cluster.hop import Hops, moved_to, not_done
from app.cluster.membership import Membership, files_key, id_key, name_key
from app.domain.errors import DirectoryAway, ReplicaAway
from app.domain.homes import home_of, home_of_response
from app.domain.text import header_text
from app.domain.values import MAX_NAME, SessionId
from app.openai.response_store import ResponseStore
from app.sessions.named import BoundSessions
from app.sessions.table import SessionTable
from app.web.idempotency import HEADER as IDEMPOTENCY_KEY
from app.web.middleware import SESSION_HEADER, TOKEN_HEADER

logger = logging.getLogger(__name__)


class About(enum.Enum):
    """Whom a request is for, by its method and path. The group is the id that the path names."""

    GATHERED = (
        "GET /v1/(?:sessions(?:/closed)?|models|memory|activity|findings|events|vectors|dictionaries|lenses|probes)"
    )
    """Every replica: their answers are merged."""
    EVERY = "(?!GET|HEAD|OPTIONS)[A-Z]+ /v1/(?:vectors|dictionaries|lenses|probes).*"
    """Every replica: all sessions may name these."""
    NEW = "POST /v1/(?:sessions|sessions/import|conversations)"
    """Any replica with room: it opens a session."""
    CALL = "POST /v1/(?:chat/completions|completions|messages)"
    """The replica with the session that a header may name."""
    CREATE_RESPONSE = "POST /v1/responses(?:/compact|/input_tokens)?|websocket /v1/responses"
    """The same, or the replica with the response or conversation that the body names."""
    FILES = "[A-Z]+ /v1/(?:files|batches).*"
    """The replica that keeps the caller's files and batches."""
    SESSION = "[A-Z]+ /v1/sessions/([^/]*).*"
    """The replica that has it."""
    RESPONSE = "[A-Z]+ /v1/(?:responses|conversations)/([^/]*).*"
    """The replica that has the response or the conversation."""
    HERE = ".*"
    """The replica that is asked: each would answer alike, or only for itself. It refuses unknown paths."""


PATTERNS = [(each, re.compile(each.value, re.DOTALL)) for each in About]
TURN = "POST /v1/(?:chat/completions|completions|messages|responses|responses/compact|sessions/.*/(?:generate|resume))"
OWNED = frozenset({About.SESSION, About.RESPONSE, About.CREATE_RESPONSE, About.CALL, About.FILES})
"""Requests that have an owner."""
Target = tuple[About, str]
"""Whom a request is for, and the id that its path names, if it names one."""


def target_of(scope: Scope) -> Target:
    """What a request is about. A WebSocket whose headers name nothing is about what its first message says."""
    asked = f"{scope.get('method', 'websocket')} {scope['path']}"
    about, found = next((each, found) for each, pattern in PATTERNS if (found := pattern.fullmatch(asked)))
    headers = Headers(scope=scope)
    if scope["type"] == "websocket" and (SESSION_HEADER in headers or TOKEN_HEADER in headers):
        about = About.CALL if about is About.CREATE_RESPONSE else about
    return about, "".join(found.groups())


def is_turn(scope: Scope) -> bool:
    """Whether the request asks for a turn, or for the rest of one."""
    return re.fullmatch(TURN, f"{scope['method']} {scope['path']}", re.DOTALL) is not None


def previous_response(content: bytes) -> str | None:
    """The response or conversation that a call continues. None, too, for a body that a replica will refuse."""
    try:
        fields: Any = orjson.loads(content.removeprefix(codecs.BOM_UTF8))  # as replicas read it
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    held = fields.get("conversation")
    found = held.get("id") if isinstance(held, dict) else held
    value = fields.get("previous_response_id") if found is None else found
    return value if isinstance(value, str) else None


def name_in(scope: Scope) -> str | None:
    """The name or id by which a call's headers name a session. None, too, for a name that any replica refuses."""
    headers = Headers(scope=scope)
    names = [header_text(each) for each in headers.getlist(SESSION_HEADER)]
    if not names and home_of(token := headers.get(TOKEN_HEADER, "")) is not None:
        names = [token]
    return names[0] if names and 0 < len(names[0]) <= MAX_NAME else None


REMEMBERED = 100_000
"""How many places are remembered without asking the store."""
PATIENCE_S = 3.0
"""How long a replica may take to say whether it has something."""
AT_ONCE = 16
"""Questions to all replicas at the same time: each costs every replica a request."""
NOBODY_S = 1.0
"""How long it is remembered that no replica has something, as clients retry."""
KEYS = (b"authorization", b"x-api-key")
DEFINITE = frozenset({200, 401, 403, 404, 421})
"""Statuses that tell whether a replica has it. Others, such as 429, leave that open."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The replica of a request, and the store's key for it, if it has one. If it `is_new`, it was chosen just now for
    something new, and another one would do; by the `draw`, if any, all choose alike. `path` is the one by which
    replicas say whether they have it, if they can. `is_name`: a client chose the key as a name. If no replica has it, a
    new session gets the name.
    """

    replica: Replica
    key: str | None = None
    is_new: bool = False
    path: bytes = b""
    is_name: bool = False
    draw: str | None = None


class Owners:
    """Finds the owner of a session, a response or a name. Used on the event loop only."""

    def __init__(
        self, names: Membership, hops: Hops, sessions: SessionTable, bound: BoundSessions, responses: ResponseStore
    ) -> None:
        """`sessions`, `bound` and `responses` are this server's own, including those on their way to or from it."""
        self.names = names
        self._hops, self._fleet = hops, hops.fleet
        self._sessions, self._bound, self._responses = sessions, bound, responses
        self._known: dict[str, tuple[Replica, str]] = {}
        """Where a key is, and the journal that the replica had then."""
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._asking: dict[tuple[bytes, ...], asyncio.Task[Replica | None]] = {}
        """By the path and the client's keys, because the answer depends on the client."""

    async def of(self, scope: Scope, target: Target, whole: Callable[[], Awaitable[bytes]]) -> Owner:
        """The replica for a request, whose body `whole` returns. What is new is placed where there is room, with an
        `Idempotency-Key` at the same replica at each try. So is a new name, and one whose replica is gone for good, if
        no other has it. Raises `ReplicaAway`, `DirectoryAway` and `ClientDisconnect`.
        """
        about, named = target
        owner: str | None = scope["state"]["owner"]
        if about is About.CREATE_RESPONSE and (previous := previous_response(await whole())) is not None:
            about, named = About.RESPONSE, previous
        if about in (About.SESSION, About.RESPONSE):
            return await self._of_id(about, named, scope)
        if about is About.FILES:
            return await self._of_key(files_key(owner), None, b"", scope)
        name = None if about is About.NEW else name_in(scope)
        if name is None:
            key = Headers(scope=scope).get(IDEMPOTENCY_KEY)
            draw = None if key is None else f"{owner or ''} {key}"
            return Owner(self._fleet.place(key=draw), is_new=True, draw=draw)
        is_id = home_of(name) is not None
        if self._bound.has(owner, name):
            return Owner(self._fleet.own, None if is_id else name_key(owner, name))
        if is_id:
            return await self._of_id(About.SESSION, name, scope)
        path = f"/v1/sessions?limit=1&name={quote(name, safe='')}".encode()
        return await self._of_key(name_key(owner, name), None, path, scope)

    async def replaced(self, owner: Owner, but: Collection[str]) -> Owner:
        """Another replica for something new, as those in `but` take nothing. Raises `ReplicaAway`, `DirectoryAway`."""
        if owner.key is None:
            return Owner(self._fleet.place(but, owner.draw), is_new=True, draw=owner.draw)
        return await self._rebound(owner.key, owner.replica.name, but)

    def trusted(self, name: str | None) -> Replica | None:
        """The replica of that name; None if another journal has had the name: it does not know what has left that."""
        return None if name in self.names.renewed else self._fleet.find(name)

    async def moved(self, key: str, replica: str) -> None:
        """Note that a replica has said where something is."""
        self._remember(key, replica)
        try:
            await self.names.put(key, replica)
        except DirectoryAway as error:
            logger.warning("%s; what has moved is known here alone", error.message)

    async def _of_id(self, about: About, named: str, scope: Scope) -> Owner:
        """The replica that has the session, or the response or conversation, of that id."""
        if about is About.SESSION:
            kind, home, is_here = "sessions", home_of(named), self._sessions.has(SessionId(named))
        else:
            kind = "conversations" if named.startswith("conv_") else "responses"
            home, is_here = home_of_response(named), self._responses.has(named)
        if is_here or home is None:  # no replica makes ids without a home: this one says whether the caller may ask
            return Owner(self._fleet.own, id_key(named) if is_here else None)
        return await self._of_key(id_key(named), home, f"/v1/{kind}/{quote(named, safe='')}".encode(), scope)

    async def _of_key(self, key: str, home: str | None, path: bytes, scope: Scope) -> Owner:
        """The owner of a key: as remembered, by its home, by the store, or as all are asked; a new name gets one."""
        is_name, first, away = home is None, self.trusted(home), None
        replica, journal = self._known.get(key, (None, ""))
        if replica is None or replica.seen.journal != journal:
            replica = first
        known = None if replica is None else replica.name
        if replica is None or replica.state is State.AWAY:
            try:
                known = await self.names.find(key) or known
            except DirectoryAway as error:  # known sessions go on without the store
                away = error
            if is_name and known is None and away is None:
                return await self._rebound(key, None)
            replica = self._fleet.find(known)
        if replica is None or replica.state is State.AWAY:
            if path and (found := await self.seek(path, scope)) is not None:
                self._remember(key, found.name)
                if away is None and found.name != home:
                    await self.moved(key, found.name)
                return Owner(found, key, path=path, is_name=is_name)
            if away is not None:
                raise away
            if (known := known or home) in self.names.known:
                return Owner(self._fleet.reachable(known), key)  # raises, or its answer passes
            return await self._rebound(key, known) if is_name else Owner(self._fleet.own)
        if replica is not first:
            self._remember(key, replica.name)
        return Owner(replica, key, path=path, is_name=is_name)

    async def _rebound(self, key: str, old: str | None, but: Collection[str] = ()) -> Owner:
        """Choose a replica for the key. Of several that do so at the same time, one wins."""
        placed = self._fleet.place(but, is_named=True).name
        found = await self.names.swap(key, old, placed)
        self._remember(key, found)
        return Owner(self._fleet.reachable(found), key, is_new=found == placed)

    async def seek(self, path: bytes, scope: Scope) -> Replica | None:
        """Ask all which of them has it; equal questions share an answer. Raises `ReplicaAway` if one is silent."""
        question = path, *(value for name, value in scope["headers"] if name in KEYS)
        if question not in self._asking:
            task = self._asking[question] = asyncio.create_task(self._ask_all(path, scope))
            task.add_done_callback(partial(self._keep, question))
        return await asyncio.shield(self._asking[question])

    def _keep(self, question: tuple[bytes, ...], task: asyncio.Task[Replica | None]) -> None:
        is_found = task.cancelled() or (task.exception() is None and task.result() is not None)
        asyncio.get_running_loop().call_later(0 if is_found else NOBODY_S, self._asking.pop, question, None)

    async def _ask_all(self, path: bytes, scope: Scope) -> Replica | None:
        async with self._at_once:
            told = await self._hops.get(self._fleet.answering, scope, path, PATIENCE_S)
        has = [
            replica
            for replica, (answer, page) in told.items()
            if not_done(answer.raw_headers) == "moving"
            or (answer.status_code == 200 and page.get("data") != [])  # a list of those so named
        ]
        homes = {replica: moved_to(answer.raw_headers) for replica, (answer, _) in told.items()}
        left = {replica: self._fleet.find(home) for replica, home in homes.items() if home is not None}
        last = [home for home in left.values() if home is not None and home not in left]  # not handed on since
        sure = {replica.name for replica, (answer, _) in told.items() if answer.status_code in DEFINITE}
        silent = {*self.names.known, *(each.name for each in told)} - sure
        if silent:  # a replica may have forgotten where it sent the session
            last = [home for home in last if home.state is not State.AWAY and home not in homes]
        found = next(iter([*has, *last]), None)
        if found is None and (silent or (left and None not in left.values())):
            who = f"replica {', '.join(sorted(silent))}" if silent else "a replica"
            raise ReplicaAway(f"{who} may have what this request is about, and does not answer: try again")
        return found

    def _remember(self, key: str, name: str) -> None:
        self._known.pop(key, None)
        if (replica := self._fleet.find(name)) is not None:
            self._known[key] = replica, replica.seen.journal
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
