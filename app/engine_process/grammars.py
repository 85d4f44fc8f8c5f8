"""Grammars that another process compiles and holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future

from app.domain.errors import DjinnError, EngineAway, EngineRestarting
from app.domain.values import Grammar
from app.engine_process.frames import Compile, Prepare, Release


class HeldGrammar:
    """The engine finds the grammar as long as this is held."""

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release

    def __del__(self) -> None:
        self._release()


class RemoteGrammars:
    """Has grammars compiled. Any thread may call it."""

    def __init__(self, send: Callable[[Compile | Release | Prepare], bool]) -> None:
        """`send` says whether there is an engine that takes frames."""
        self._send = send
        self._numbers = itertools.count()
        self._compiling: dict[int, Future[HeldGrammar]] = {}

    def prepare(self) -> None:
        """Have the vocabulary read: better beside no turn."""
        self._send(Prepare())

    def compile(self, grammar: Grammar) -> Future[HeldGrammar]:
        """Have it compiled, unless it is already. The future raises what the engine's compiler raises, and
        `EngineAway`.
        """
        number = next(self._numbers)
        future: Future[HeldGrammar] = Future()
        self._compiling[number] = future
        future.add_done_callback(lambda done: self._release(number) if done.cancelled() else None)
        if not self._send(Compile(number, grammar)):
            self.fail_all(EngineRestarting("it is being started again"))
        return future

    def settle(self, number: int, error: DjinnError | None) -> None:
        """Take the engine's answer."""
        future = self._compiling.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(HeldGrammar(lambda: self._send(Release(number))))
        else:
            self._send(Release(number))
            future.set_exception(error)

    def fail_all(self, error: EngineAway) -> None:
        """The engine has died or stalled: nothing is waited for any more. One that goes on need not compile."""
        for number in list(self._compiling):
            future = self._compiling.pop(number, None)
            self._send(Release(number))
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _release(self, number: int) -> None:
        """Cancel the wait for a grammar that is being compiled."""
        if self._compiling.pop(number, None) is not None:
            self._send(Release(number))
