"""Bytes over a real socket: TCP on the loopback interface, from one thread to another."""

from __future__ import annotations

import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

TIMEOUT_S = 60.0
ACKNOWLEDGED = b"\x06"


@dataclass(frozen=True, slots=True)
class Loopback:
    """How many seconds `bytes` bytes took, each time."""

    bytes: int
    seconds: tuple[float, ...]

    @property
    def bytes_per_s(self) -> float:
        """By the median time."""
        return self.bytes / statistics.median(self.seconds)


def time_loopback(content: bytes, repeats: int) -> Loopback:
    """Seconds from the first byte sent until the receiver has told that it has the last, for each of `repeats` times.

    One connection carries them all, and one transfer before that is not counted: by then the receiver's memory has been
    written once and the congestion window is open. Raises `OSError`, also if what arrived is not what was sent.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as receiver:
        server.settimeout(TIMEOUT_S)
        received = receiver.submit(_receive, server, len(content), repeats + 1)
        with socket.create_connection(server.getsockname(), TIMEOUT_S) as sender:
            seconds = [_send(sender, content) for _ in range(repeats + 1)]
        if received.result() != content:
            raise OSError("what arrived over the loopback interface is not what was sent")
    return Loopback(len(content), tuple(seconds[1:]))


def _send(sender: socket.socket, content: bytes) -> float:
    begin = time.perf_counter()
    sender.sendall(content)
    if sender.recv(1) != ACKNOWLEDGED:
        raise OSError("the receiver closed the connection")
    return time.perf_counter() - begin


def _receive(server: socket.socket, size: int, times: int) -> bytearray:
    """What came last."""
    buffer = bytearray(size)
    connection, _ = server.accept()
    with connection:
        connection.settimeout(TIMEOUT_S)
        for _ in range(times):
            rest = memoryview(buffer)
            while rest:
                count = connection.recv_into(rest)
                if not count:
                    raise OSError("the sender closed the connection")
                rest = rest[count:]
            connection.sendall(ACKNOWLEDGED)
    return buffer
