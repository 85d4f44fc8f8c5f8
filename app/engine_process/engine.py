"""The engine as the server sees it: in another process, which is replaced when it dies.

There are two signs. A process that says nothing is suspended, or starved: it beats each second, whatever its engine
does. An engine that beats may still be stuck, for example in a kernel that never ends: then its count of messages,
layers and steps stands still. One layer of a long prompt takes seconds on a slow processor, so that takes longer.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from app.domain.errors import DjinnError, EngineError, EngineRestarting, EngineStalled
from app.domain.values import ModelInfo
from app.engine_process.channel import Channel, Closed
from app.engine_process.executor import Deliver, RemoteGrammars
from app.engine_process.frames import Beat, Compiled, Dying, Frame, Load, Loaded, Stop, decode, encode
from app.machine.cores import binding
from app.machine.handover import send_socket
from app.messages import Back, Command, GoesOn, Lost, Stalled, TurnFinished

logger = logging.getLogger(__name__)

PRIVATE = "DJINN_"
"""Variables of the environment that begin so are settings of the server, keys among them."""
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Has PyTorch ask for pages of 2 MiB for large tensors: in a prompt, each layer writes its results to new memory.
Measured for 1,000 tokens of a 135M Llama on one thread, busy cores: 0.90 and 0.94 of the CPU time of all kernels.
"""
END_TIMEOUT_S = 10.0
"""How long a process that has nothing left to say may take to end."""


class Child:
    """A process that runs `app.engine_process`. It begins to import PyTorch at once, which takes seconds."""

    def __init__(self) -> None:
        """Start the process. Raises `OSError` if the machine has no room for one."""
        ours, theirs = socket.socketpair()
        self._sockets, their_sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sockets.setblocking(False)  # an engine that reads nothing must not hold up the event loop
        given = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
        environment = LARGE_PAGES | binding(given) | given
        descriptors = [theirs.fileno(), their_sockets.fileno()]
        with theirs, their_sockets:
            try:
                self._process = subprocess.Popen(
                    # -P: the working folder may have its own `app`.
                    [sys.executable, "-P", "-m", "app.engine_process", *map(str, descriptors)],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # a server's own stdout has one line, for the program that waits for it
                    env=environment,
                )
            except OSError:
                ours.close()
                self._sockets.close()
                raise
        self.channel = Channel(ours)

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def give(self, number: int, connection: socket.socket) -> None:
        """Send a connection to another server over, to be known by that number there; this process closes its own.

        Raises `OSError`.
        """
        with connection:
            send_socket(self._sockets, number, connection)

    def wait(self) -> str:
        """Wait until the process has ended, which it is made to in the end. Returns how."""
        try:
            status = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        self.channel.close()
        self._sockets.close()
        if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process ended with status {status}"

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()


SILENT_S = 3.0
"""Without a beat for so long: new work is refused. Most late processes beat again before their turns must end."""
UNHEARD_S = 7.0
"""Without a beat for so long: turns end too. Their clients can repeat them where an engine works."""


LOOK_S = 0.5
"""Between two looks at a process that says nothing."""
STOP_TIMEOUT_S = 10.0
"""How long a process that has been told to stop may take: a write to a disk that has stalled may never end."""
PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Before each attempt to start another engine. After the last one the server gives up."""
MOST = 5
WITHIN_S = 600.0
"""So many engines that died within so many seconds, and finished no turn, are the last: the next would die too."""
LOADS = 10.0
"""How many times as long as the first another engine may load: files may not be in the page cache any more."""


class EngineProcess:
    """Runs an engine in a process of its own: `begin` and `loaded` first, then as `app.engine_process.executor.Engine`.

    When the process dies, or makes no progress for `timeout_s` seconds, another is started: `deliver` gets `Lost`,
    and `Back` when the new one takes commands. All that was sent before is then forgotten. Before that, `deliver` gets
    `Stalled` from an engine that makes no progress, and `GoesOn` if it makes some after all.
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
        self._deaths: deque[float] = deque(maxlen=MOST)
        """When engines have died since one has finished a turn."""
        self._connections = itertools.count()
        """Numbers of those to other servers."""
        self.grammars = RemoteGrammars(self._send)

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        assert self._info is not None
        return self._info

    @property
    def is_running(self) -> bool:
        """Whether the process that runs now has not ended."""
        return self._child.is_running

    def find(self, load: Load) -> None:
        """Have the process find the model, long before `begin`: what that needs is imported by then."""
        self._child.channel.send(encode(replace(load, only_find=True)))

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
        """See `app.engine_process.executor.Engine`."""
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
            self._deaths.append(time.monotonic())
            if len(self._deaths) == MOST and self._deaths[-1] - self._deaths[0] <= WITHIN_S:  # the next would die too
                minutes = WITHIN_S / 60
                raise EngineError(f"it died {MOST} times within {minutes:.0f} minutes, and no turn came to its end")
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
        self._reason, silent_s, busy_s = "", 0.0, 0.0
        told: Stalled | None = None
        while True:
            try:
                data = self._child.channel.receive(LOOK_S)
            except Closed:
                how = self._child.wait()
                return self._reason or how
            if time.monotonic() > self._stops_at:
                self._give_up("it does not stop")
            frame = None if data is None else decode(data)
            del data  # may be much memory
            # Sums of what was waited for, not by a clock: they stand still while both processes are suspended.
            silent_s = silent_s + LOOK_S if frame is None else 0.0
            busy_s = frame.busy_s if isinstance(frame, Beat) else busy_s
            if silent_s > self._timeout_s:
                self._give_up(f"it has said nothing for {self._timeout_s:g} s")
            told = self._tell(told, self._stall(silent_s, busy_s), deliver)
            if isinstance(frame, list):
                if self._deaths and any(isinstance(event, TurnFinished) for event in frame):
                    self._deaths.clear()
                deliver(frame)
            elif frame is not None:
                self._take(frame)

    def _stall(self, silent_s: float, busy_s: float) -> Stalled | None:
        """Whether an engine makes no progress whose process has said nothing for so long, and that was busy with one
        thing for so long by its last beat.
        """
        if silent_s >= SILENT_S:
            return Stalled(f"its process has said nothing for {silent_s:.0f} s", ends_turns=silent_s >= UNHEARD_S)
        if busy_s >= self._stuck_s:
            return Stalled(f"it has been busy with one thing for {busy_s:.0f} s", ends_turns=True)
        return None

    def _tell(self, before: Stalled | None, now: Stalled | None, deliver: Deliver) -> Stalled | None:
        """Tell what has changed: the engine makes no progress, or makes some again. Returns what has been told last."""
        if before is not None and now is not None and before.ends_turns >= now.ends_turns:
            return before
        if before is now or self._stopping.is_set():
            return now
        if now is None:
            logger.warning("the engine makes progress again and takes turns")
        else:
            logger.error(
                "the engine makes no progress: %s; %s",
                now.reason,
                "its turns fail" if now.ends_turns else "new turns are refused",
            )
            if now.ends_turns:
                self.grammars.fail_all(EngineStalled(now.reason, refused=False))
        deliver([now or GoesOn()])
        return now

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
        # The server loads its adapters again: without one that is gone by now, the model still runs.
        load = replace(self._load, engine=replace(self._load.engine, lora=()))
        for pause_s in PAUSES_S:
            if self._stopping.wait(pause_s):
                return False
            try:
                self._child = self._start()
                self._child.channel.send(encode(load))
                found = self._wait_until_loaded(self._load_timeout_s)
            except (DjinnError, OSError) as error:  # the machine may be short of memory or descriptors just now
                logger.error("no other engine could be started: %s", error)
                continue
            if self._stopping.is_set():
                self._child.channel.send(encode(Stop()))
                self._child.wait()
                return False
            if replace(found, adapters=self.info.adapters) == self.info:
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
            if isinstance(frame, Loaded) and frame.found is not None:
                return frame.found
            if isinstance(frame, Loaded) and frame.error is not None:
                self._child.wait()
                raise frame.error
            if isinstance(frame, Dying):
                self._reason = frame.reason
