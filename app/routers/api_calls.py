"""What the routes of other APIs share: the call, its session, its refusals, and its one way to the engine."""

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Depends, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator
from starlette.datastructures import Headers

from app.domain.errors import (
    ContextTooLong,
    DjinnError,
    FieldOutOfRange,
    MalformedRequest,
    Moved,
    Moving,
    RefusedGrammar,
    Restated,
    WrongState,
)
from app.domain.text import header_text
from app.domain.values import MAX_NAME, Adapter, ModelInfo, SamplingParams
from app.engine_process.turn import Turn
from app.logs import is_background
from app.openai.answers import Choices
from app.routers.dependencies import CleanupDep, KeyedDep, OwnerDep, Services, ServicesDep, errors
from app.sessions.adapters import ServedAdapter
from app.sessions.keyed import KeyedRequest
from app.sessions.session import Session
from app.sessions.table import holding
from app.sessions.turns import TurnRequest
from app.settings import Settings
from app.text.generation import begun_character
from app.tools.definitions import ToolUse
from app.tools.replay import ChatPrompt, go_on
from app.tools.support import turn_grammar
from app.tools.thinking import Opening
from app.web.bodies import JsonRoute
from app.web.errors import describe_validation
from app.web.middleware import SESSION_HEADER, TOKEN_HEADER
from app.web.openapi import component
from app.web.sse import EventStream
from app.wire.calls import CallBody, IgnoredFields, OpenBody

MOMENT_S = 2.0
"""How long a call waits for the turn of the session that it continues."""
SessionHeader = Annotated[
    Annotated[str, BeforeValidator(header_text)] | None,
    Header(
        alias=SESSION_HEADER,
        min_length=1,
        max_length=MAX_NAME,
        description="binds the call to a session: a session id, or any name, whose first use opens a session",
    ),
]


MAX_TOKEN = 4096
TokenHeader = Annotated[
    str | None,
    Header(
        alias=TOKEN_HEADER,
        max_length=MAX_TOKEN,
        description="binds the call to the session whose answer had this token; one of another server has no effect",
    ),
]


async def _session_name(
    request: Request,
    services: ServicesDep,
    owner: OwnerDep,
    session_name: SessionHeader = None,
    session_token: TokenHeader = None,
) -> str | None:
    # The parameters are in the OpenAPI document; a WebSocket has the headers only.
    return name_in(request.headers, services, owner)


SessionNameDep = Annotated[str | None, Depends(_session_name)]
"""What `X-Session-ID` says, or a token of this server's."""


def name_in(headers: Headers, services: Services, owner: str | None) -> str | None:
    """The session that the headers name: by `X-Session-ID`, else by a token that is the id of the owner's open one.

    Raises `FieldOutOfRange` for several names, or a bad one, and what `BoundSessions.find` raises for a token.
    """
    names = set(map(header_text, headers.getlist(SESSION_HEADER)))
    if len(names) > 1 or not all(1 <= len(name) <= MAX_NAME for name in names):
        raise FieldOutOfRange.at(SESSION_HEADER, f"a call is bound to one session, by 1 to {MAX_NAME} characters")
    token = headers.get(TOKEN_HEADER)
    is_open = not names and token and services.bound_sessions.find(owner, token) is not None
    return token if is_open else next(iter(names), None)


HINTS_IN_HEADERS = {
    "client_session": ("session-id", "x-claude-code-session-id", "x-session-affinity"),
    "client_agent": ("x-claude-code-agent-id", "thread-id"),
}
"""By label, headers in which agents name their own sessions, and the agents in them. They bind nothing."""
MAX_LABEL = 512
MAX_WORDS = 60
"""Characters of what a user says, as the name of a conversation."""
TAGGED, MAX_BEFORE = re.compile(r"\A(?:\s*<([\w-]+)>.*?</\1>)+", re.DOTALL), 8
"""What agents put before a user's words, in tags such as `<system-reminder>`, within so many messages."""
IN_USER_ID = re.compile(r"""(?:_session_|"session_id": ?")([0-9a-f-]{36})""")
"""Claude Code's session in `metadata.user_id`."""


def client_hints(headers: Headers) -> dict[str, str]:
    """What the agent's own headers say of it, by label."""
    found = {label: [headers[name] for name in names if headers.get(name)] for label, names in HINTS_IN_HEADERS.items()}
    return {label: header_text(said[0]) for label, said in found.items() if said}


IGNORED_HEADER = "X-Djinn-Ignored"
IGNORED_DESCRIPTION: dict[str, Any] = {
    IGNORED_HEADER: {
        "description": "paths of the fields without effect, separated by commas",
        "schema": {"type": "string"},
    }
}
"""The documented headers of an answer that names ignored fields."""
BOUND_HEADERS: dict[str, Any] = {
    SESSION_HEADER: {"description": "the session that the call was bound to", "schema": {"type": "string"}},
    TOKEN_HEADER: {"description": "the same, for clients that send it back", "schema": {"type": "string"}},
    **IGNORED_DESCRIPTION,
}
"""Those of a generating route."""


class OpenAIRoute(JsonRoute):
    """A route that answers 400 where the others answer 422, and names the fields and parameters that it ignored."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The framework's handler between the account of ignored fields and the header made of it."""
        handle = super().get_route_handler()

        async def handle_openai(request: Request) -> Response:
            services: Services = request.app.state.services
            ignored = IgnoredFields(strict=services.settings.strict_fields)
            request.state.ignored_fields = ignored
            try:
                response = await handle(self._with_known_query(request, ignored))
            except RequestValidationError as error:
                raise as_bad_request(describe_validation(request, error)) from error
            except DjinnError as error:
                raise as_bad_request(error) from error
            if ignored.header:
                response.headers[IGNORED_HEADER] = ignored.header
            for label in ignored.labels():
                services.metrics.ignored_fields.labels(label).inc()
            return response

        return handle_openai

    def _with_known_query(self, request: Request, ignored: IgnoredFields) -> Request:
        """The request without the query parameters that the route does not know. Raises `FieldOutOfRange` if strict."""
        query = request.query_params
        models: list[Any] = [each.field_info.annotation for each in self.dependant.query_params]
        known = {name for model in models for name in model.model_fields}
        if query.keys() <= known:
            return request
        ignored.add(name for name in query if name not in known)
        left = urlencode([(name, value) for name, value in query.multi_items() if name in known])
        return Request({**request.scope, "query_string": left.encode()}, request.receive)


async def _ignored_fields(request: Request) -> IgnoredFields:
    ignored: IgnoredFields = request.state.ignored_fields
    return ignored


IgnoredDep = Annotated[IgnoredFields, Depends(_ignored_fields)]
"""The account of the call's ignored fields, which its answer names. A route gives it the body first of all."""


def openai_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that can fail with `statuses` beside those that every OpenAI route can fail with."""
    return {status: answer for status, answer in errors(400, *statuses).items() if status != FieldOutOfRange.status}


def as_bad_request(error: DjinnError) -> DjinnError:
    """The error as these routes answer it: 400 where the others answer 422."""
    return Restated(error, status=MalformedRequest.status) if error.status == FieldOutOfRange.status else error


@dataclass(slots=True)
class ApiCall:
    """One call of OpenAI's or Anthropic's API: who makes it, and the session that it is bound to, if any."""

    services: Services
    owner: str | None
    cleanup: AsyncExitStack
    """Unwound when the response is over."""
    ignored: IgnoredFields
    session_name: str | None = None
    """What `X-Session-ID` says."""
    keyed: KeyedRequest | None = None
    """What `Idempotency-Key` does."""
    client: Mapping[str, str] = field(default_factory=dict)
    """What `client_hints` says of the caller."""
    stays_connected: bool = False
    """Whether its client may go on after it on the same connection."""
    adapter: Adapter | None = None
    """The one that it asks for; None: it asks for the base."""
    is_aside: bool = False
    """Whether it runs in no session, as the named one is busy with something else."""
    _words: str = ""
    """The first words of the user in its chat."""
    _session: Session | None = None
    _turn: Turn | None = None

    def choose(self, model: str | None) -> ModelInfo:
        """Have the call's turns computed by the model of that name. Returns it, under the name that answers tell.

        Raises `UnknownModel`.
        """
        found = self.services.sessions.adapters.get(model)
        self.adapter = None if found is None else found.adapter
        return self.services.info if found is None else as_model(self.services.info, found)

    def named_session(self) -> Session | None:
        """The session that the call names, if there is one. Raises what `BoundSessions.find` does, and `WrongState` for
        the id of a session of another model.
        """
        if self.session_name is None:
            return None
        session = self.services.bound_sessions.find(self.owner, self.session_name, self.adapter)
        if session is not None and not session.is_of(self.adapter):
            base = self.services.info.name
            theirs, ours = (base if each is None else each.name for each in (session.adapter, self.adapter))
            raise WrongState(
                f"session {session.id} is of model {theirs!r}, and the call asks for {ours!r}: a session keeps its "
                "model; leave its id out, or name another session",
                param="model",
            )
        return session

    async def requests(
        self,
        body: CallBody,
        prompts: Sequence[Sequence[int]],
        use: ToolUse,
        *,
        opening: Opening = Opening.CLOSED,
        budget: int | None = None,
        **options: Any,
    ) -> list[TurnRequest]:
        """The turns that the call asks for, one for each prompt: the one way from any API's body to the engine.
        `opening` is how the prompts leave the model's turn, `budget` how many tokens it may think, and `options` are
        more of a `TurnRequest`.

        Raises `FieldOutOfRange` for fields that do not fit the model or each other, and `ContextTooLong`.
        """
        services, prompt_field = self.services, body.prompt_field
        turns, support = services.sessions.turns, services.tool_support
        body.check_vocabulary(services.info.vocab_size)
        rooms = []
        for index, prompt in enumerate(prompts):
            param = prompt_field if len(prompts) == 1 else f"{prompt_field}.{index}"
            if not prompt:
                raise FieldOutOfRange.at(param, "a turn needs at least 1 token to start from")
            rooms.append(turns.room(len(prompt), body.token_limit, param=param, limit_param=body.limit_field))
        asked = body.to_params(
            services.sampling, logprobs=body.alternatives, prompt_logprobs=body.alternatives if body.echoes else None
        )
        if budget is not None and budget >= max(rooms):
            budget = None
        sampling = await self._held(body, asked, use, opening, budget)
        eos = services.tokens.eos_token_ids | support.ends
        stops = [body.to_stop_rule(max_tokens=room, eos_token_ids=eos) for room in rooms]
        rule = replace(body.to_text_rule(), shown=support.shown(use) if body.has_chat else frozenset())
        texts = [
            replace(rule, begun=begun_character(services.tokens, prompt)) if body.echoes else rule for prompt in prompts
        ]
        return [
            TurnRequest(prompt, sampling, stop, text, replace=True, pausable=False, param=prompt_field, **options)
            for prompt, stop, text in zip(prompts, stops, texts, strict=True)
        ]

    async def _held(
        self, body: CallBody, asked: SamplingParams, use: ToolUse, opening: Opening, budget: int | None
    ) -> SamplingParams:
        """The parameters with the compiled grammar of the turns. If it is refused for schemas that calls need not
        follow, another grammar leaves those out. If that is refused too, or none alone is at fault, a last one leaves
        out all that calls need not follow. They are named in `ignored`.
        """
        turns, places = self.services.sessions.turns, body.schema_places()

        async def held(use: ToolUse) -> SamplingParams:
            grammar = turn_grammar(body.to_grammar(), use, self.services.tool_support, opening, budget, places)
            sampling = replace(asked, grammar=grammar)
            await turns.compile_grammar(self.owner, sampling, body.min_tokens, self.cleanup)
            return sampling

        while True:
            try:
                sampling = await held(use)
            except RefusedGrammar as error:
                left = {tool.name for tool in use.free} - use.freed
                if not left:
                    raise
                odd = {name for name in left if not use.freed and places.get(name) in error.odd}
                use = replace(use, freed=use.freed | (odd or left))
            else:
                self.ignored.add(places[tool.name] for tool in use.free if tool.name in use.freed & places.keys())
                return sampling

    async def start(
        self,
        body: CallBody,
        prompts: Sequence[Sequence[int]],
        use: ToolUse,
        *,
        n: int = 1,
        user: str | None = None,
        opening: Opening = Opening.CLOSED,
        budget: int | None = None,
        **options: Any,
    ) -> Choices:
        """Submit the prompts' turns; they end and their sessions close when the response is over.

        `n` choices are made for each prompt; `user` is metadata of a session that the call opens; `opening`, `budget`
        and `options` are as for `requests`.

        Raises what `requests` does, `WrongState` if the bound session is in use, `Moved` if it is on another server,
        `Busy` and `Draining`.
        """
        registry = self.services.sessions
        _check_count(self.services.settings, prompts=len(prompts), n=n)
        requests = await self.requests(body, prompts, use, opening=opening, budget=budget, **options)
        # Before any session gives way: a refused call must close nothing.
        of_choices = [request for request in requests for _ in range(n)]
        await self.meet_busy(prompts)
        charges = registry.turns.reserve(self.owner, of_choices, self.cleanup)
        with ExitStack() as undo:
            sessions = await self._sessions(n, self.labels(body, user), undo, prompts)
            choices = Choices(registry, requests, n, charges, sessions, self.cleanup, self.keyed)
            await choices.start()
            undo.pop_all()
        self._turn = None if self._session is None else self._session.turn
        return choices

    async def go_on(self, body: CallBody, prompt: ChatPrompt, session: Session | None = None) -> ChatPrompt:
        """The prompt in the tokens of the history that it continues, as far as both mean the same. `session` has that
        history; None: the named session, or one that the call may be bound to by its prompt.

        The prompt stays as it is if the context has no room for it with the thoughts of the history.
        """
        said = [str(message["content"]) for message in islice(prompt.chat, MAX_BEFORE) if message["role"] == "user"]
        first = next(filter(str.strip, (TAGGED.sub("", each) for each in said)), "".join(said[:1]))
        self._words = " ".join(first[:MAX_LABEL].split())[:MAX_WORDS]
        services, named = self.services, session is not None or self.session_name is not None
        if session is None and self.session_name is not None:
            with suppress(Moved, Moving):  # which `start` raises
                session = self.named_session()
            sessions = [] if session is None else [session]
        elif session is None:
            alike = services.bound_sessions.begun_alike
            sessions = [] if is_background() else alike(self.owner, prompt.token_ids, self.adapter)
        else:
            sessions = [session]
        pasts = [each.past for each in sessions if each.usage.answers]
        if not pasts:
            return prompt
        tokens, support = services.tokens, services.tool_support
        try:
            found = await services.side_work.run(
                self.owner, partial(go_on, prompt, pasts, tokens, support, named=named)
            )
            services.sessions.turns.room(len(found.token_ids), body.token_limit)
        except (ContextTooLong, MalformedRequest):
            return prompt
        return found

    async def meet_busy(self, prompts: Sequence[Sequence[int]]) -> None:
        """Handle a call that names a session whose turn is under way. A call that continues the session's history waits
        up to `MOMENT_S`: it may be a retry. Any other, such as one for a title, is a side call, and runs without a
        session.
        """
        if self.session_name is None or len(prompts) != 1:
            return
        bound = self.services.bound_sessions
        session = self.named_session()
        if session is None or not session.under_way:
            return
        self.is_aside = not bound.goes_on(session, prompts[0])
        if not self.is_aside and session.turn is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(MOMENT_S):
                    await session.turn.ended.wait()

    def labels(self, body: OpenBody, user: str | None) -> dict[str, str]:
        """The metadata of a session that the call opens, what people know it by first: its name, what its agent says,
        or else how its user begins. A session that it finds keeps its metadata.
        """
        extras = body.model_extra or {}
        said = extras.get("client_metadata")  # Codex's
        fields = said if isinstance(said, dict) else {}
        of_user = IN_USER_ID.search(user or "")
        hints = {
            "client_session": (fields.get("session_id"), extras.get("prompt_cache_key"), of_user and of_user[1]),
            "client_agent": (fields.get("thread_id"),),
        }
        labels = {} if self.session_name is None or self.is_aside else {"name": self.session_name}
        for label, others in hints.items():
            found = [hint for hint in (self.client.get(label), *others) if isinstance(hint, str) and hint]
            if found and found[0][:MAX_LABEL] not in labels.values():
                labels[label] = found[0][:MAX_LABEL]
        if not labels and self._words:
            labels["name"] = self._words
        return labels if user is None else {**labels, "user": user}

    @property
    def binds(self) -> bool:
        """Whether the call may go on with a session by its history. A line of a batch leaves those to clients."""
        return self.services.settings.binds_by_prefix and not self.is_aside and not is_background()

    def answer(self, response: Response) -> Response:
        """The response, with the session's id in its headers if the call was bound to one."""
        return response if self._session is None else with_session(response, self._session)

    def wait_for_tools(self, names: Sequence[str]) -> None:
        """The answer has called these tools: the session that the call is bound to waits until its next call."""
        services = self.services
        if self._session is not None and self._turn is not None and services.settings.park_on_tool_calls:
            services.sessions.wait_for_tools(self._session, self._turn, names)

    async def _sessions(
        self, n: int, metadata: dict[str, str], undo: ExitStack, prompts: Sequence[Sequence[int]]
    ) -> list[Session]:
        """Where the choices run: each in a session that lives as long as the call, or the one in the bound session.

        A name's first use opens a session, which `undo` drops if the call cannot start.
        """
        sessions, name = self.services.sessions, self.session_name
        if self.is_aside or (name is None and not (self.binds and n == len(prompts) == 1)):
            # For all or none: a refused call must close nothing.
            sessions.make_room(self.owner, n * len(prompts))
            opening = (
                sessions.ephemeral(self.owner, metadata=metadata, adapter=self.adapter) for _ in range(n * len(prompts))
            )
            return [await self.cleanup.enter_async_context(each) for each in opening]
        if n > 1:
            raise FieldOutOfRange(f"n must be 1 with {SESSION_HEADER}: a session has one history", param="n")
        if len(prompts) > 1:
            raise FieldOutOfRange(f"prompt must be one prompt with {SESSION_HEADER}", param="prompt")
        bound = self.services.bound_sessions
        if name is None:
            session = bound.find_continued(self.owner, prompts[0], metadata, self.adapter)
        else:
            session = self.named_session()
        if session is None:
            if name is None:
                session = bound.open_unnamed(self.owner, self.cleanup, metadata=metadata, adapter=self.adapter)
            else:
                session = bound.open(self.owner, name, metadata=metadata, adapter=self.adapter)
            undo.callback(sessions.drop, session)
        self._session = session
        self.cleanup.enter_context(holding(session))  # it moves to no other server before the call is over
        return [session]


async def _api_call(
    request: Request,
    services: ServicesDep,
    owner: OwnerDep,
    cleanup: CleanupDep,
    ignored: IgnoredDep,
    session_name: SessionNameDep,
    keyed: KeyedDep,
) -> ApiCall:
    return ApiCall(services, owner, cleanup, ignored, session_name, keyed, client_hints(request.headers))


ApiCallDep = Annotated[ApiCall, Depends(_api_call)]


def with_session(response: Response, session: Session) -> Response:
    """The response, with the session's id in its headers."""
    response.headers[SESSION_HEADER] = response.headers[TOKEN_HEADER] = session.id
    return response


def as_model(info: ModelInfo, adapter: ServedAdapter) -> ModelInfo:
    """What is served under the adapter's name."""
    return replace(info, name=adapter.adapter.name, adapters=(adapter.loaded,))


def _check_count(settings: Settings, *, prompts: int, n: int) -> None:
    """Raise `FieldOutOfRange` for more choices than the server takes even if it has nothing else to do.

    Each has a session and a turn. Towards the end of the call all of them may run or wait at once.
    """
    param = "n" if n > 1 else "prompt"
    for limit, what in (
        (settings.max_sessions, "sessions can be open at once"),
        (settings.max_turns, "turns can run or wait at once"),
    ):
        if prompts * n > limit:
            raise FieldOutOfRange.at(
                param, f"{prompts} prompts with {n} choices each are too many: at most {limit} {what}"
            )


def generation_responses(event: Any) -> dict[int | str, dict[str, Any]]:
    """The documented `responses` of a generating route that streams `event`s."""
    return {
        **openai_errors(404, 409, 421, 429, 503),
        200: {
            "description": "The answer; with `stream`, an event for each chunk, then `[DONE]`.",
            "headers": BOUND_HEADERS,
            "content": {EventStream.media_type: {"schema": component(event)}},
        },
    }


def told_of(prompt: ChatPrompt) -> dict[str, Any]:
    """The field of an answer that says why its prompt does not go on from the whole history of its session."""
    because = prompt.recomputed_because
    return {} if because is None else {"djinn": {"recomputed_because": because}}


def page_of(items: Sequence[Any], after: str | None, limit: int, where: str = "the list") -> dict[str, Any]:
    """At most `limit` of the items behind the one with the id `after`, as OpenAI pages lists.

    Raises `FieldOutOfRange` if no item has that id.
    """
    if after:
        places = {item.id: place for place, item in enumerate(items, 1)}
        if after not in places:
            raise FieldOutOfRange.at("after", f"no item {after[:100]} in {where}")
        items = items[places[after] :]
    page = items[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return {"object": "list", "data": page, "has_more": len(items) > limit, "first_id": first, "last_id": last}
