"""Who has listened to a move and repeats it gets no second session, and publishes nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from app.cluster.moves.wire import COMMIT, OFFER, Answer
from app.domain.homes import Taken
from tests.cluster.pair import PROMPT, SOON_S, Pair, code, generate, open_session, pair, used_session


class Listener(socketserver.ThreadingTCPServer):
    """Stands between two servers: it keeps what one says to the other, and loses what it is told to."""

    daemon_threads = True

    def __init__(self, there: int, loses: str) -> None:
        super().__init__(("127.0.0.1", 0), Ear)
        self.there = there
        self.loses = loses.encode()
        self.said: list[bytearray] = []
        """Of each connection."""

    def heard(self, path: str) -> bytes:
        """All from the request for that path on, on its connection."""
        (found,) = (said for said in self.said if f"POST {path} ".encode() in said)
        return bytes(found[found.index(f"POST {path} ".encode()) :])


class Ear(socketserver.BaseRequestHandler):
    """One connection."""

    server: Listener

    def handle(self) -> None:
        """Pass on both ways what comes, until one end closes it."""
        said = bytearray()
        self.server.said.append(said)
        with socket.create_connection(("127.0.0.1", self.server.there)) as there:
            back = threading.Thread(target=self._pass, args=(there, self.request, bytearray()))
            back.start()
            self._pass(self.request, there, said)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket, said: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                said += data
                if self.server.loses in said:
                    break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def listened(folder: Path, loses: str) -> Iterator[tuple[Pair, Listener]]:
    """Servers of which `a` reaches `b` through a listener."""
    with pair(folder, start=False) as servers, Listener(servers.ports["b"], loses) as listener:
        urls = {**servers.urls, "b": f"http://127.0.0.1:{listener.server_address[1]}"}
        (folder / "peers.json").write_text(json.dumps(urls))
        threading.Thread(target=listener.serve_forever).start()
        try:
            for name in ("a", "b"):
                servers.start(name)
            yield servers, listener
        finally:
            listener.shutdown()


def say(servers: Pair, said: bytes) -> tuple[socket.socket, http.client.HTTPResponse]:
    """Say it to `b`, which answers."""
    connection = socket.create_connection(("127.0.0.1", servers.ports["b"]), SOON_S)
    connection.sendall(said)
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return connection, answer


def test_what_is_repeated_is_not_taken_and_publishes_nothing(tmp_path: Path) -> None:
    with listened(tmp_path, loses=COMMIT) as (servers, listener):
        session = used_session(servers.a)
        assert code(servers.move(session)) == (503, "move_unsettled")
        assert servers.settled(session) == "a"
        offer = listener.heard(OFFER)
        head = re.match(rb"(?s).*?content-length: (\d+)\r\n.*?\r\n\r\n", offer)
        assert head is not None
        end = head.end() + int(head[1])
        connection, answer = say(servers, offer[:end])
        with connection:
            assert answer.status == 101
            connection.sendall(offer[end:])  # the session itself
            assert connection.recv(1) == b"", "b has received it all"
        connection, answer = say(servers, listener.heard(COMMIT))
        with connection:
            assert msgspec.msgpack.decode(answer.read(), type=Answer).taken is Taken.NO
        assert servers.owners(session) == ["a"]
        assert generate(servers.b, open_session(servers.b), [*PROMPT, 1])["usage"]["cached_tokens"] == 0
