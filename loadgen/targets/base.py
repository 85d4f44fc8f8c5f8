"""What the runner needs of a server, and how a target comes to be up while it is measured."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import BaseModel

from client.calls import Call
from client.edge import DEFAULT_TIMEOUT_S, Connection
from client.transport import AsyncTransport, Trace
from loadgen.errors import LoadgenError
from loadgen.load.clocks import TurnClock
from loadgen.load.prompts import TokenIds
from loadgen.load.records import TurnCost
from loadgen.processes.launch import Calibration

WITH_TOOLS = "+tools"
"""Ends the name of a model whose agents call tools."""
WITH_SIGNALS = "+signals"
"""Follows it if the agents of a Djinn server signal."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Where a server is. With a `model` it is spoken to as an OpenAI-compatible server, without one as Djinn.

    `tools`: its agents are chats that end each turn with a call of a tool. `signals`: these agents signal, as only a
    Djinn server understands.

    `pid` is the server's process on this machine, `command` how it was started and `versions` those of its packages,
    where the load generator knows; `calibration` has the figures that chose its data type. It may be silent for
    `timeout_s`.
    """

    name: str
    url: str
    model: str | None = None
    tools: bool = False
    signals: bool = False
    api_key: str | None = field(default=None, repr=False)
    pid: int | None = None
    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S

    @classmethod
    def parse(cls, text: str) -> TargetSpec:
        """Read `NAME=URL` (Djinn's own protocol), `NAME=URL#MODEL`, or with tools `NAME=URL#MODEL+tools` (OpenAI's).

        `+signals` may follow `+tools`.

        Raises `LoadgenError`.
        """
        name, _, address = text.partition("=")
        url, separator, model = address.partition("#")
        if not name or not url or (separator and not model):
            raise LoadgenError(f"a target is NAME=URL, NAME=URL#MODEL or NAME=URL#MODEL{WITH_TOOLS}, not {text!r}")
        if not url.startswith(("http://", "https://")):
            raise LoadgenError(f"the URL of target {name} must be http://HOST[:PORT] or https://..., not {url!r}")
        if "@" in url:
            raise LoadgenError(f"the URL of target {name} must be without a user, whose password would be published")
        if url.rstrip("/").endswith("/v1"):
            raise LoadgenError(f"the URL of target {name} must be that of the server, without /v1")
        bare = model.removesuffix(WITH_SIGNALS)
        signals = bare != model and bare.endswith(WITH_TOOLS)
        model = bare if signals else model
        return cls(name, url, model.removesuffix(WITH_TOOLS) or None, model.endswith(WITH_TOOLS), signals)

    def transport(self, trace: Trace | None = None) -> AsyncTransport:
        """A pool of connections to the server; `trace` as in `AsyncTransport`.

        Raises `LoadgenError` if the address is not HTTP.
        """
        try:
            return AsyncTransport(Connection(self.url, self.api_key, self.timeout_s), trace)
        except ValueError as error:
            raise LoadgenError(f"target {self.name}: {error}") from error


class Agent(Protocol):
    """One agent's conversation with a server."""

    @property
    def is_exact(self) -> bool:
        """Whether its turns have exactly as many tokens as are asked for."""
        ...

    async def run_turn(self, new_ids: TokenIds, completion_tokens: int, clock: TurnClock) -> TurnCost:
        """Add `new_ids` to the conversation and generate `completion_tokens`, greedily: exactly, or about as many.

        Tells `clock` when the first request goes out, of every event with tokens, and when the turn is over. Raises
        `client.DjinnError`.
        """
        ...

    async def leave(self, away_s: float | None) -> str | None:
        """Tell the server that the next turn comes after `away_s` seconds, or with None some time.

        Returns the phase that it was told, None if it was told nothing. Raises `client.DjinnError`.
        """
        ...

    async def come_back(self) -> str | None:
        """Tell the server that the next turn is about to come; like `leave`."""
        ...

    async def close(self) -> None:
        """End the conversation and close its connections. Raises `client.DjinnError`."""
        ...


class MakesAgents(Protocol):
    """What agents come from."""

    def new_agent(self) -> Agent:
        """A new conversation, of which the server learns with the first turn.

        It has a pool of connections to itself, as agents have: httpx goes through all of a pool's connections at every
        request, and with hundreds in one pool that alone would hold up every event by tens of milliseconds.
        """
        ...


class Target(MakesAgents, Protocol):
    """One server."""

    @property
    def spec(self) -> TargetSpec:
        """Where it is."""
        ...

    async def prepare(self, tokens: int) -> None:
        """Find out what the server can do. Raises `LoadgenError` unless its context holds `tokens` tokens."""
        ...

    async def tokenize(self, text: str, special: bool) -> TokenIds:
        """The ids of `text` in the server's model, with its special tokens in front if `special`."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class _Tokens(BaseModel):
    tokens: tuple[int, ...]


def tokenize_call(text: str, special: bool, model: str | None = None) -> Call[TokenIds]:
    """`POST /tokenize`, which vLLM and Djinn both have."""
    body = {"prompt": text, "add_special_tokens": special} | ({} if model is None else {"model": model})
    return Call("POST", "/tokenize", read_tokens, json=body)


def read_tokens(answer: bytes) -> TokenIds:
    """What `/tokenize` answers. Raises `ValueError` if it is something else."""
    return _Tokens.model_validate_json(answer).tokens


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None


class _Models(BaseModel):
    data: tuple[_Model, ...]


MODELS = Call("GET", "/v1/models", lambda answer: _Models.model_validate_json(answer).data)
"""What a server runs; vLLM and Djinn also say how many tokens fit in a model's context."""


def check_context(spec: TargetSpec, models: tuple[_Model, ...], tokens: int) -> None:
    """Raise `LoadgenError` unless the target runs the model it is to run, with room for `tokens` tokens."""
    wanted = [model for model in models if spec.model in (None, model.id)]
    if not wanted:
        names = ", ".join(model.id for model in models)
        raise LoadgenError(f"target {spec.name} has no model {spec.model}, only {names}")
    room = wanted[0].max_model_len
    if room is not None and tokens > room:
        raise LoadgenError(f"the last turn ends at {tokens} tokens, but target {spec.name} has room for {room}")


class Access(Protocol):
    """One target that is to be measured, once or several times."""

    @property
    def name(self) -> str:
        """What the target is called in the report."""
        ...

    @property
    def running(self) -> TargetSpec | None:
        """Where the target is if it is up all the while; None if `reach` starts it."""
        ...

    def reach(self) -> AbstractAsyncContextManager[TargetSpec]:
        """A block in which the target is up. Raises `LoadgenError` if it does not come up."""
        ...


@dataclass(frozen=True, slots=True)
class RunningTarget:
    """A server that the load generator neither started nor stops."""

    spec: TargetSpec

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def running(self) -> TargetSpec:
        return self.spec

    @asynccontextmanager
    async def reach(self) -> AsyncIterator[TargetSpec]:
        yield self.spec
