"""Servers for tests, with a tiny model of random weights: a real uvicorn in a thread, or only the parts behind it."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn

from app.main import load_app
from app.routers.dependencies import Services
from app.settings import Settings

START_TIMEOUT_S = 90
"""The first server of a model compiles kernels."""
STOP_LOOKS = 300
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
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    def work() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(run())

    thread = threading.Thread(target=work, name="test-server")
    thread.start()
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the server did not start")
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        for _ in range(STOP_LOOKS):  # a machine that stands still for minutes costs one of them, not all
            if thread.is_alive():
                thread.join(timeout=START_TIMEOUT_S / STOP_LOOKS)
        if thread.is_alive():
            raise RuntimeError(f"the server did not stop; where it is:\n{_where(thread, loops)}")


def _where(thread: threading.Thread, loops: Sequence[asyncio.AbstractEventLoop]) -> str:
    """Where the server's thread is, and each task of its loops."""
    text = io.StringIO()
    traceback.print_stack(sys._current_frames().get(thread.ident or 0), file=text)
    for loop in loops:
        print(loop, "at", loop.time(), file=text)
        for task in asyncio.all_tasks(loop):
            print(task, file=text)
            coroutine: Any = task.get_coro()
            while frame := getattr(coroutine, "cr_frame", None):  # a task's own stack ends at its outermost coroutine
                print("  ", frame.f_code.co_qualname, "at line", frame.f_lineno, file=text)
                coroutine = coroutine.cr_await
    return text.getvalue()


@asynccontextmanager
async def running_services(**changed: Any) -> AsyncIterator[Services]:
    """The parts of a running server, without HTTP in front."""
    app = load_app(tiny_settings(**changed))
    async with app.router.lifespan_context(app):
        yield app.state.services
