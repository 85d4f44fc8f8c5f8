# Generated from client/_async by `python client/_generate.py`: make changes there.
"""The client: a server, and the sessions on it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from client import calls
from client._sync.session import Session
from client._sync.vectors import Vectors
from client.edge import DEFAULT_TIMEOUT_S, Connection
from client.memory_models import MemoryMap
from client.models import Health, Model, Residency, SessionState, Tier
from client.retries import DEFAULT_RETRIES
from client.transport import Transport


class Sessions:
    """The sessions on the server that belong to this API key."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_s: int | None = None,
        residency: Residency | None = None,
    ) -> Session:
        """Open a session. As a context manager it is closed at the end of the block.

        With `residency="guaranteed"` its KV never gives way; `RateLimited` if the server cannot promise that to more.
        """
        info = self._transport.send(calls.create_session(metadata, ttl_s, residency))
        return Session(self._transport, info)

    def import_from(self, path: str | Path) -> Session:
        """Open a session from a file that `export_to` wrote, here or elsewhere, from a server of the same model.

        Raises `Unprocessable` if the file is damaged or of another model.
        """
        return Session(self._transport, self._transport.upload(calls.import_session(), Path(path)))

    def get(self, session: str) -> Session:
        """The session with this id. It stays open at the end of a block. Raises `NotFound`."""
        return Session(self._transport, self._transport.send(calls.get_session(session)), is_found=True)

    def list(self, *, state: SessionState | None = None, tier: Tier | None = None) -> Iterator[Session]:
        """Every session, or every one in `state` and with its KV in `tier`; asks for page after page as needed."""
        after: str | None = None
        while True:
            page = self._transport.send(calls.list_sessions(state, tier, after))
            for info in page.data:
                yield Session(self._transport, info, is_found=True)
            after = page.next_after
            if after is None:
                return


class Djinn:
    """A Djinn server. Use it as a context manager, or `close` it when done.

    The client retries a call up to `max_retries` times where the server says that nothing was done, or cannot be
    reached. Calls that open sessions or start turns have an `Idempotency-Key`: the client retries them after a lost
    connection too, and nothing is done twice.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_RETRIES,
    ) -> None:
        self._transport = Transport(Connection(base_url, api_key, timeout, max_retries))
        self.sessions = Sessions(self._transport)
        self.vectors = Vectors(self._transport)

    def memory(self) -> MemoryMap:
        """Where the engine's memory is, and how busy it is."""
        return self._transport.send(calls.memory())

    def models(self) -> tuple[Model, ...]:
        """The models that the server runs."""
        return self._transport.send(calls.models())

    def health(self) -> Health:
        """Whether the server is alive; needs no API key."""
        return self._transport.send(calls.health())

    def close(self) -> None:
        """Close every connection. Sessions stay on the server."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()
