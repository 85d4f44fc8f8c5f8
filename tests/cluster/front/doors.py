"""Front doors on threads, and replicas that do as a test says."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from app.cluster.directory import Directory
from app.cluster.fleet import Fleet
from app.cluster.front.server import Front, FrontServer
from app.cluster.table import Table
from app.domain.errors import DirectoryAway
from app.web.connections import Caps
from app.web.listener import bind
from app.web.server import Hangups
from tests.serving import START_TIMEOUT_S, PromptServer, tiny_settings
from tests.waiting import wait_until


@dataclass
class Door:
    url: str
    fleet: Fleet
    server: FrontServer

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)


@contextmanager
def serving_door(
    urls: Mapping[str, str], directory: Directory | None = None, hangups: Hangups | None = None, **changed: Any
) -> Iterator[Door]:
    """A front door before these replicas, with the settings of tiny ones."""
    settings, fleet = tiny_settings(**changed), Fleet(urls)
    front = Front(settings, fleet, Table(None) if directory is None else directory)
    said: list[str] = []
    server = FrontServer(front, Caps.of(settings, descriptors=4096), said.append, hangups=hangups)
    with bind("127.0.0.1", 0) as bound:
        host, port = bound.getsockname()
        thread = threading.Thread(target=server.run, args=([bound],), name="front-door")
        thread.start()
        try:
            wait_until(lambda: bool(said) or not thread.is_alive())
            assert said
            yield Door(f"http://{host}:{port}", fleet, server)
        finally:
            server.should_exit = True
            thread.join(START_TIMEOUT_S)
    assert not thread.is_alive()


@contextmanager
def serving_stub(app: ASGIApp, port: int = 0) -> Iterator[str]:
    """A replica that is only `app`, on that port or any; yields its URL."""
    config = uvicorn.Config(app, port=port, log_level="warning", lifespan="off", access_log=False)
    with PromptServer(config).in_thread() as url:
        yield url


class AwayDirectory:
    async def find(self, key: str) -> str | None:
        raise DirectoryAway("the directory does not answer")

    async def bind(self, key: str, replica: str) -> str:
        raise DirectoryAway("the directory does not answer")

    async def put(self, key: str, replica: str) -> None:
        raise DirectoryAway("the directory does not answer")
