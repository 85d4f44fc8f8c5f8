"""How fast KV can travel: links by nominal speed, and a real TCP socket on the loopback interface."""

from __future__ import annotations

import math
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from loadgen.errors import LoadgenError

GB = 1e9
"""Speeds are given in powers of ten, as vendors and networks do."""


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes to go. `measured`: on this machine, in this run; else it is the nominal speed, one way."""

    name: str
    bytes_per_s: float
    measured: bool = False

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read `NAME=GB/s`. Raises `LoadgenError`."""
        name, _, speed = text.rpartition("=")
        try:
            gb_per_s = float(speed)
        except ValueError:
            gb_per_s = math.nan
        if not name or not 0 < gb_per_s < math.inf:
            raise LoadgenError(f"--link is NAME=GB/s with a speed above 0, such as wifi=0.1, not {text!r}")
        return cls(name, gb_per_s * GB)

    def seconds(self, size: float) -> float:
        """How long `size` bytes take at this speed; latency is left out."""
        return size / self.bytes_per_s


NOMINAL_LINKS = (
    Link("1 GbE", 0.125 * GB),
    Link("10 GbE", 1.25 * GB),
    Link("100 GbE", 12.5 * GB),
    Link("PCIe 4 x16", 31.5 * GB),
    Link("PCIe 5 x16", 63.0 * GB),
    Link("NVLink 4", 450.0 * GB),
)
"""Line rates one way. PCIe: 16 lanes of 16 and 32 GT/s with 128b/130b encoding, before packet headers. NVLink 4: the 18
links of an H100, 900 GB/s both ways together, by NVIDIA's data sheet."""


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
