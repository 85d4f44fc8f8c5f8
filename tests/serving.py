"""Servers for tests, with a tiny model of random weights: a real uvicorn in a thread, or only the parts behind it."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
import uvicorn

from app.main import load_app
from app.routers.dependencies import Services
from app.settings import Settings
from app.web.server import close_connections

START_TIMEOUT_S = 90
"""The first server of a model compiles kernels."""
TICK_S = 0.1
"""Between what uvicorn does regularly, such as the next `Date`."""
KEEP_ALIVE_S = 75
"""As `djinn serve` has it. On a busy machine clients pause for uvicorn's 5 s: a request meets a closed connection."""


def tiny_settings(**changed: Any) -> Settings:
    """Settings of a model that loads in no time, with room for 256 blocks of 16 tokens."""
    values: dict[str, Any] = {
        "model": "random:tiny-llama",
        "kv_device": 4 << 20,
        "max_model_len": 1024,
        "state_dir": None,
    }
    if changed.get("kv_policy") != "none":
        values["kv_host"] = 16 << 20
    return Settings(**{**values, **changed})


class PromptServer(uvicorn.Server):
    """A uvicorn that sees at once that it shall stop, and stops: the original looks ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """From any thread; the server may have ended by itself."""
        self.should_exit = True
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._stopping.set)

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await close_connections(self)
        await self.lifespan.shutdown()

    @contextmanager
    def in_thread(self) -> Iterator[str]:
        """Serve in a block on a thread; yields the URL."""

        def work() -> None:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self.serve())

        thread = threading.Thread(target=work, name="test-server")
        thread.start()
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not self.started:
                if not thread.is_alive() or time.monotonic() > deadline:
                    raise RuntimeError("the server did not start")
                time.sleep(0.005)
            yield f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"
        finally:
            self.stop()
            thread.join(timeout=START_TIMEOUT_S)
            if thread.is_alive():
                for task in asyncio.all_tasks(self.loop):
                    task.print_stack()
                raise RuntimeError("the server did not stop; its tasks are above")


@contextmanager
def serve(*, clock: Callable[[], float] = time.time, port: int = 0, **changed: Any) -> Iterator[str]:
    """A server on a free port; yields its base URL. In-process ASGI clients buffer streams and cannot disconnect.

    `clock` is that of tenants. `port` is for a server that comes after another.
    """
    app = load_app(tiny_settings(**changed), clock=clock)
    config = uvicorn.Config(
        app,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    with PromptServer(config).in_thread() as url:
        yield url


@contextmanager
def own_server(**changed: Any) -> Iterator[httpx.Client]:
    """A client of a server with these settings."""
    with serve(**changed) as url, httpx.Client(base_url=url, timeout=30) as http:
        yield http


@asynccontextmanager
async def running_services(**changed: Any) -> AsyncIterator[Services]:
    """The parts of a running server, without HTTP in front."""
    app = await asyncio.to_thread(load_app, tiny_settings(**changed))
    async with app.router.lifespan_context(app):
        yield app.state.services
