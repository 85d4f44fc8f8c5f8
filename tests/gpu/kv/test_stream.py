"""KV on a connection comes whole, in whatever parts, and the receiver waits for nothing behind it."""

from __future__ import annotations

import socket
import threading

import pytest

from app.gpu.kv.stream import SLICE_BYTES, receive_into

SOON_S = 60.0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        return out, server.accept()[0]


@pytest.mark.parametrize("lengths", [[100], [2 * SLICE_BYTES + 5, 100], [100, SLICE_BYTES - 3, 1, 3 * SLICE_BYTES]])
def test_the_last_bytes_are_not_waited_for_in_vain(lengths: list[int]) -> None:
    spans = [memoryview(bytearray(length)) for length in lengths]
    sent = bytes(range(256)) * (sum(lengths) // 256 + 2)
    out, into = tcp_pair()
    with out, into:
        into.settimeout(SOON_S)
        for again in (sent, sent[7:]):  # over the same connection, which stays open
            sending = threading.Thread(target=out.sendall, args=(again[: sum(lengths)],))
            sending.start()
            receive_into(into, spans)
            sending.join()
            assert b"".join(spans) == again[: sum(lengths)]
