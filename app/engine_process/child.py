"""One process with an engine: started, listened to, ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from app.engine_process.channel import Channel
from app.machine.cores import binding
from app.machine.handover import send_socket

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
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

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
