"""The engine as the server sees it: in another process, which is replaced when it dies."""

from __future__ import annotations

import itertools
import logging
import math
import socket
import threading
import time
from collections.abc import Callable

from app.bridge.executor import Deliver
from app.domain.errors import DjinnError, EngineError, EngineRestarting, EngineStalled
from app.domain.values import ModelInfo
from app.engine_process.channel import Closed
from app.engine_process.child import Child
from app.engine_process.codec import Frame, decode, encode
from app.engine_process.deaths import Deaths
from app.engine_process.frames import Beat, Compiled, Dying, Find, Load, Loaded, NotLoaded, Stop
from app.engine_process.grammars import RemoteGrammars
from app.engine_process.stalls import Stalls
from app.messages import Back, Command, GoesOn, Lost, Stalled

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at a process that says nothing."""
STOP_TIMEOUT_S = 10.0
"""How long a process that has been told to stop may take: a write to a disk that has stalled may never end."""
PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Before each attempt to start another engine. After the last one the server gives up."""
LOADS = 10.0
"""How many times as long as the first another engine may load: files may not be in the page cache any more."""


class EngineProcess:
    """Runs an engine in a process of its own: `begin` and `loaded` first, then as `app.bridge.executor.Engine`.

    When the process dies, or makes no progress for `timeout_s` seconds, another is started: `deliver` gets `Lost`,
    and `Back` when the new one takes commands. All that was sent before is then forgotten. Before that, `deliver` gets
    `Stalled` from an engine that does not get on, and `GoesOn` if it does so in the end.
    """

    def __init__(self, timeout_s: float, start: Callable[[], Child] = Child, *, stuck_s: float = math.inf) -> None:
        """`start` starts a process. `stuck_s`: how long one layer or step may take before the engine has stalled."""
        self._timeout_s, self._stuck_s = timeout_s, stuck_s
        self._start = start
        self._child = start()
        self._load: Load | None = None
        self._began_at = 0.0
        self._load_timeout_s = timeout_s
        self._info: ModelInfo | None = None
        self._is_open = False
        """Whether the process takes commands."""
        self._stopping = threading.Event()
        self._stops_at = math.inf
        """When `run` waits no longer for a process that has been told to stop."""
        self._reason = ""
        """What the process said of its own end."""
        self._deaths = Deaths()
        self._connections = itertools.count()
        """Numbers of those to other servers."""
        self.grammars = RemoteGrammars(self._send)

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        assert self._info is not None
        return self._info

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._child.pid

    @property
    def is_running(self) -> bool:
        """Whether the process that runs now has not ended."""
        return self._child.is_running

    def find(self, load: Load) -> None:
        """Have the process find the model, long before `begin`: what that needs is imported by then."""
        self._child.channel.send(encode(Find(load)))

    def begin(self, load: Load) -> None:
        """Begin to load the model, which takes seconds or minutes."""
        self._load, self._began_at = load, time.monotonic()
        self._child.channel.send(encode(load))

    def loaded(self) -> EngineProcess:
        """Wait until the model is loaded. Raises the `DjinnError` that says why it is not."""
        self._info = self._wait_until_loaded(None)
        self._load_timeout_s = max(self._timeout_s, LOADS * (time.monotonic() - self._began_at))
        self._is_open = True
        return self

    def send(self, command: Command) -> None:
        """Queue a command; its answer comes through `deliver`, unless the process dies before."""
        self._send(command)

    def give(self, connection: socket.socket) -> int:
        """See `app.bridge.executor.Engine`."""
        number = next(self._connections)
        self._child.give(number, connection)
        return number

    def run(self, deliver: Deliver) -> None:
        """Deliver events until `stop`, on the calling thread. Raises `EngineError` if no engine can be started, or if
        one after the other dies.
        """
        while True:
            reason = self._listen(deliver)
            if self._stopping.is_set():
                return
            self._is_open = False
            logger.error("the engine has died: %s; another is started", reason)
            self.grammars.fail_all(EngineRestarting(reason))
            deliver([Lost(reason)])
            self._deaths.note()
            if not self._replace():
                return
            self._is_open = True
            deliver([Back()])

    def stop(self) -> None:
        """Make `run` return; what is still running ends as `Failed(Draining)`."""
        self._stops_at = time.monotonic() + STOP_TIMEOUT_S
        self._stopping.set()
        self._child.channel.send(encode(Stop()))

    def close(self) -> None:
        """End the process; for an engine that never ran."""
        self._stopping.set()
        self._child.kill()
        self._child.wait()

    def _send(self, frame: Frame) -> bool:
        """Whether the process takes frames; else it goes nowhere."""
        if self._is_open:
            self._child.channel.send(encode(frame))
        return self._is_open

    def _listen(self, deliver: Deliver) -> str:
        """Deliver events until the process has ended; returns why it has."""
        self._reason, stalls = "", Stalls(self._stuck_s)
        while True:
            try:
                data = self._child.channel.receive(LOOK_S)
            except Closed:
                how = self._child.wait()
                return self._reason or how
            if time.monotonic() > self._stops_at:
                self._give_up("it does not stop")
            if data is None:
                stalls.wait(LOOK_S)
                if stalls.silent_s > self._timeout_s:
                    self._give_up(f"it has said nothing for {self._timeout_s:g} s")
                self._tell(stalls.news(), deliver)
                continue
            frame = decode(data)
            stalls.hear(frame.busy_s if isinstance(frame, Beat) else None)
            self._tell(stalls.news(), deliver)
            if isinstance(frame, list):
                self._deaths.note_events(frame)
                deliver(frame)
            else:
                self._take(frame)

    def _tell(self, news: Stalled | GoesOn | None, deliver: Deliver) -> None:
        """Say that the engine does not get on, or does so again."""
        if news is None or self._stopping.is_set():
            return
        if isinstance(news, GoesOn):
            logger.warning("the engine goes on: it takes turns again")
        else:
            logger.error(
                "the engine does not get on: %s; %s",
                news.reason,
                "its turns fail" if news.ends_turns else "new turns are refused",
            )
            if news.ends_turns:
                self.grammars.fail_all(EngineStalled(news.reason, refused=False))
        deliver([news])

    def _take(self, frame: Frame) -> None:
        match frame:
            case Compiled(number, error):
                self.grammars.settle(number, error)
            case Beat(busy_s):
                if busy_s > self._timeout_s:
                    self._give_up(f"it has made no progress for {busy_s:.0f} s")
            case Dying(reason):
                self._reason = reason
            case _:
                raise EngineError(f"unexpected frame from the engine: {type(frame).__name__}")

    def _give_up(self, reason: str) -> None:
        """End a process that hangs; then its end of the channel closes."""
        self._reason = reason
        self._child.kill()

    def _replace(self) -> bool:
        """Start another process, in several attempts; False if the server stops meanwhile. Raises `EngineError`."""
        assert self._load is not None
        for pause_s in PAUSES_S:
            if self._stopping.wait(pause_s):
                return False
            try:
                self._child = self._start()
                self._child.channel.send(encode(self._load))
                found = self._wait_until_loaded(self._load_timeout_s)
            except (DjinnError, OSError) as error:  # the machine may be short of memory or descriptors just now
                logger.error("no other engine could be started: %s", error)
                continue
            if self._stopping.is_set():
                self._child.channel.send(encode(Stop()))
                self._child.wait()
                return False
            if found == self.info:
                return True
            logger.error("the new engine is not as the one before: %s instead of %s", found, self.info)
            self._child.kill()
            self._child.wait()
        raise EngineError("it died, and no other could be started")

    def _wait_until_loaded(self, timeout_s: float | None) -> ModelInfo:
        """Raises `DjinnError` if the process says why it cannot run, ends, or takes more than `timeout_s`."""
        self._reason, waited_s = "", 0.0
        while True:
            try:
                data = self._child.channel.receive(LOOK_S)
            except Closed:
                how = self._child.wait()
                raise EngineError(f"the engine could not be started: {self._reason or how}") from None
            if data is None:
                waited_s += LOOK_S  # by looks, not by a clock: it goes on while both processes are suspended
                if self._stopping.is_set():
                    self._child.kill()
                elif timeout_s is not None and waited_s > timeout_s:
                    self._give_up(f"it has not loaded the model within {timeout_s:.0f} s")
                continue
            frame = decode(data)
            if isinstance(frame, Loaded):
                return frame.info
            if isinstance(frame, NotLoaded):
                self._child.wait()
                raise frame.error
            if isinstance(frame, Dying):
                self._reason = frame.reason
