# Generated from client/_async by `python client/_generate.py`: make changes there.
"""The client: a server, and the sessions on it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from pathlib import Path
from typing import Any, Literal, Self

import httpx

from client import breakpoint_calls, calls, experiments
from client._sync.jobs import ActivationsJobs
from client._sync.live import live_events
from client._sync.session import Session
from client._sync.uploads import Dictionaries, Lenses, Probes
from client._sync.vectors import Vectors
from client.breakpoint_models import PointInfo
from client.calls import PAGE_SIZE, UNSET, Seconds, given
from client.edge import DEFAULT_TIMEOUT_S, KEY_VARIABLE, Connection, address_of
from client.experiments import Activations, Patching, Prompts
from client.history_models import Activity, ClosedSessions, Findings
from client.live import Event
from client.memory_models import CapacityEstimate, MemoryEstimate, MemoryMap
from client.models import Health, Model, Residency, SessionState, Tier, Version
from client.retries import DEFAULT_RETRIES
from client.transport import Transport


class Sessions:
    """The sessions on the server that belong to this API key."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.address!r})"

    def create(
        self,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_s: int | None = None,
        residency: Residency | None = None,
        model: str | None = None,
        timeout: Seconds = UNSET,
    ) -> Session:
        """Open a session. As a context manager it is closed at the end of the block.

        `model` is one of `models()`, such as a LoRA adapter, which the session keeps; None: the base.
        With `residency="guaranteed"` its KV never gives way; `RateLimited` if the server cannot promise that to more.
        """
        info = self._transport.send(calls.create_session(metadata, ttl_s, residency, model), timeout)
        return Session(self._transport, info)

    def import_from(self, path: str | Path, *, timeout: Seconds = UNSET) -> Session:
        """Open a session from a file that `export_to` wrote, here or elsewhere, from a server of the same model.

        Raises `Unprocessable` if the file is damaged or of another model.
        """
        info = self._transport.upload(calls.import_session(), Path(path), timeout)
        return Session(self._transport, info)

    def get(self, session: str, *, timeout: Seconds = UNSET) -> Session:
        """The session with this id. It stays open at the end of a block. Raises `NotFound`."""
        info = self._transport.send(calls.get_session(session), timeout)
        return Session(self._transport, info, is_found=True)

    def settle(self, session: str, peer_is_dead: str, *, timeout: Seconds = UNSET) -> Session:
        """Keep a session that is locked in a move to a server that never comes back. Only an operator may.

        `peer_is_dead` is the UUID of that server's journal, which no server may use any more. Raises `Conflict` if the
        session is not locked; `Unprocessable`, which names the right UUID, for another one.
        """
        info = self._transport.send(calls.settle_session(session, peer_is_dead), timeout)
        return Session(self._transport, info, is_found=True)

    def find(self, name: str, *, timeout: Seconds = UNSET) -> Session | None:
        """The session that requests to the OpenAI and Anthropic routes name with `X-Session-ID`, if there is one."""
        page = self._transport.send(calls.list_sessions(name=name, limit=1), timeout)
        return Session(self._transport, page.data[0], is_found=True) if page.data else None

    def list(
        self,
        *,
        state: SessionState | None = None,
        tier: Tier | None = None,
        page_size: int = PAGE_SIZE,
        timeout: Seconds = UNSET,
    ) -> Iterator[Session]:
        """Every session, or every one in `state` and with its KV in `tier`, oldest first.

        Asks for page after page as needed, each of up to `page_size` (at most 100).
        """
        after: str | None = None
        while True:
            call = calls.list_sessions(state=state, tier=tier, after=after, limit=page_size)
            page = self._transport.send(call, timeout)
            for info in page.data:
                yield Session(self._transport, info, is_found=True)
            after = page.next_after
            if after is None:
                return

    def closed(
        self, find: str = "", *, before: float | None = None, limit: int = 20, timeout: Seconds = UNSET
    ) -> ClosedSessions:
        """Sessions that closed in the last 30 days, the last one first, `before` that time. Each word of `find` is in
        the id or in the name.
        """
        return self._transport.send(calls.closed_sessions(find, before, limit), timeout)


class Djinn:
    """A Djinn server. Use it as a context manager, or `close` it when done.

    Without `base_url` it is the one at `DJINN_BASE_URL`, or else at http://127.0.0.1:8000; without `api_key` the key is
    that in `DJINN_API_KEY`, if any. `timeout` is how long the server may be silent, in seconds, None for ever.

    The client retries a call up to `max_retries` times where the server says that nothing was done, or cannot be
    reached. Calls that open sessions or start turns have an `Idempotency-Key`: the client retries them after a lost
    connection too, and nothing is done twice.

    `http_client` has the proxies, certificates and limits that you want. It stays open: close it yourself.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_RETRIES,
        http_client: httpx.Client | None = None,
    ) -> None:
        key = os.environ.get(KEY_VARIABLE) or None if api_key is None else api_key
        connection = Connection(address_of(base_url), key, timeout, max_retries)
        self._use(Transport(connection, http=http_client))

    def _use(self, transport: Transport) -> None:
        self._transport = transport
        self.sessions = Sessions(transport)
        self.vectors = Vectors(transport)
        self.dictionaries = Dictionaries(transport)
        self.lenses = Lenses(transport)
        self.probes = Probes(transport)
        self.activation_jobs = ActivationsJobs(transport)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.address!r})"

    def with_options(self, *, timeout: Seconds = UNSET, max_retries: int | None = None) -> Self:
        """The same client with another timeout, in seconds, or another number of retries.

        It shares the connections, which only the first client closes.
        """
        other = copy(self)
        other._use(self._transport.with_options(timeout, max_retries))
        return other

    def events(self, *, after: str | None = None, timeout: Seconds = UNSET) -> AbstractContextManager[Iterator[Event]]:
        """What happens to the sessions of this API key, and the memory map every second, in a `with` block.

        First come all sessions as they are, or what followed the event with the id `after`. After a lost connection the
        client reads on from the last event, unless `max_retries` is 0.
        """
        return live_events(self._transport, after, timeout)

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool | None = None,
        timeout: Seconds = UNSET,
    ) -> tuple[int, ...]:
        """The token ids of a prompt, or of `messages` in the model's chat template.

        `add_special_tokens=False` leaves out what the model expects around a prompt.
        """
        return self._transport.send(calls.tokenize(given(locals())), timeout)

    def detokenize(self, token_ids: Sequence[int], *, timeout: Seconds = UNSET) -> str:
        """The text of tokens, special ones included."""
        return self._transport.send(calls.detokenize(token_ids), timeout)

    def memory(self, *, timeout: Seconds = UNSET) -> MemoryMap:
        """Where the engine's memory is, and how busy it is."""
        return self._transport.send(calls.memory(), timeout)

    def findings(self, *, timeout: Seconds = UNSET) -> Findings:
        """What is wrong, in sentences, and how many more agents there is room for."""
        return self._transport.send(calls.findings(), timeout)

    def activity(
        self, *, since: float = 0.0, step_s: int = 60, limit: int = 1440, timeout: Seconds = UNSET
    ) -> Activity:
        """The last 30 days by the minute: your sessions', or for an operator those of all tenants. `since` is in Unix
        seconds; at most `limit` entries, the oldest first, each the sum of `step_s` seconds.
        """
        return self._transport.send(calls.activity(since, step_s, limit), timeout)

    def estimate(self, tokens: int, *, bandwidth: float | None = None, timeout: Seconds = UNSET) -> MemoryEstimate:
        """What a session of `tokens` tokens takes, and how long it takes to move.

        It moves at `bandwidth` bytes per second, or else as fast as the server has measured.
        """
        return self._transport.send(calls.estimate(tokens, bandwidth), timeout)

    def capacity(
        self,
        *,
        context_tokens: int | None = None,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
        think_s: float | None = None,
        tools_s: float | None = None,
        first_token_s: float | None = None,
        timeout: Seconds = UNSET,
    ) -> CapacityEstimate:
        """How many more agents fit, by measured times of steps and moves.

        Each has a history of `context_tokens`. Again and again its turn computes `prompt_tokens` and generates
        `completion_tokens`, then it thinks and waits for tools; first tokens are to come within `first_token_s`. What
        is left out is as your turns of the last minutes had it.
        """
        return self._transport.send(calls.capacity(given(locals())), timeout)

    def models(self, *, timeout: Seconds = UNSET) -> tuple[Model, ...]:
        """The models that the server runs: the base under each of its names, then LoRA adapters."""
        return self._transport.send(calls.models(), timeout)

    def load_model(self, name: str, path: str, *, timeout: Seconds = UNSET) -> Model:
        """Have an operator's server load a LoRA adapter from a folder below its `--lora-dir`.

        Raises `Unprocessable` for one that cannot be read or is not for the model, `Conflict` if the name is taken.
        """
        return self._transport.send(calls.load_model(name, path), timeout)

    def unload_model(self, name: str, *, timeout: Seconds = UNSET) -> None:
        """Have an operator's server unload a LoRA adapter. Its sessions stay, and wait for the same files.

        Raises `Conflict` while turns use it.
        """
        self._transport.send(calls.unload_model(name), timeout)

    def version(self, *, timeout: Seconds = UNSET) -> Version:
        """What runs on the server: its version, the model, the device and the types of numbers."""
        return self._transport.send(calls.version(), timeout)

    def points(self, *, timeout: Seconds = UNSET) -> tuple[PointInfo, ...]:
        """The points of the model's forward pass that breakpoints can name, in their order."""
        return self._transport.send(breakpoint_calls.list_points(), timeout)

    def patching(
        self,
        clean: str | Sequence[int],
        corrupted: str | Sequence[int],
        *,
        metric: Literal["logit_difference", "probability", "kl"] = "logit_difference",
        answer: str | int | None = None,
        wrong: str | int | None = None,
        points: Sequence[str] | None = None,
        layers: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
        by: Literal["position", "head"] | None = None,
        into: Literal["corrupted", "clean"] | None = None,
        timeout: Seconds = None,
    ) -> Patching:
        """Put activations of one prompt into the other, place by place, and measure the answer each time.

        The places are each of `layers` and `positions` at each of `points` (`resid_post`), or with `by="head"` each
        head. `answer` and `wrong` are tokens. It gives way to other turns, so it may take its time.
        """
        return self._transport.send(experiments.patch(given(locals())), timeout)

    def activations(
        self,
        prompts: Prompts,
        *,
        points: Sequence[str] | None = None,
        layers: Sequence[int] | None = None,
        positions: Literal["all", "last"] | Mapping[str, Any] | None = None,
        reduce: Literal["none", "mean", "last"] | None = None,
        timeout: Seconds = None,
    ) -> Activations:
        """What up to 256 prompts have at `points` (`resid_post`) of `layers` (all).

        `positions` are `all`, `last`, `{"token_ids": [...]}` or `{"regex": "..."}`. `activation_jobs` is for more.
        """
        return self._transport.send(experiments.read_activations(given(locals())), timeout)

    def health(self, *, timeout: Seconds = UNSET) -> Health:
        """Whether the server is alive; needs no API key."""
        return self._transport.send(calls.health(), timeout)

    def ready(self, *, timeout: Seconds = UNSET) -> Health:
        """Whether the server takes new work; needs no API key. Raises `ServerError` if not: its `code` says why."""
        return self._transport.send(calls.ready(), timeout)

    def close(self) -> None:
        """Close every connection. Sessions stay on the server."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()
