"""Who has listened to a move and repeats it gets no second session, and publishes nothing."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from app.cluster.moves.wire import COMMIT, OFFER, Answer
from app.domain.homes import Taken
from tests.cluster.pair import PROMPT, SOON_S, Pair, code, generate, open_session, pair, used_session


class Listener:
    """Stands between two servers: it keeps what one says to the other, and loses what it is told to."""

    def __init__(self, port: int, loses: str) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._there = port
        self._loses = loses.encode()
        self.said: list[bytearray] = []
        """Of each connection."""
        self._sockets = [self._server]
        self._ends = contextlib.ExitStack()
        self._ends.enter_context(self._server)
        self._start(self._accept)

    def heard(self, path: str) -> bytes:
        """All from the request for that path on, on its connection."""
        (found,) = (said for said in self.said if f"POST {path} ".encode() in said)
        return bytes(found[found.index(f"POST {path} ".encode()) :])

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._ends.close()

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args)
        thread.start()
        self._ends.callback(thread.join)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here = self._ends.enter_context(self._server.accept()[0])
                there = self._ends.enter_context(socket.create_connection(("127.0.0.1", self._there)))
                self._sockets += [here, there]
                said = bytearray()
                self.said.append(said)
                for ways in ((here, there, said), (there, here, None)):
                    self._start(self._pass, *ways)

    def _pass(self, source: socket.socket, target: socket.socket, said: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if said is not None:
                    said += data
                    if self._loses in said:
                        break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def listened(folder: Path, loses: str) -> Iterator[tuple[Pair, Listener]]:
    """Servers of which `a` reaches `b` through a listener."""
    with pair(folder, start=False) as servers:
        listener = Listener(servers.ports["b"], loses)
        urls = {**servers.urls, "b": f"http://127.0.0.1:{listener.port}"}
        (folder / "peers.json").write_text(json.dumps(urls))
        for name in ("a", "b"):
            servers.start(name)
        try:
            yield servers, listener
        finally:
            listener.close()


def say(servers: Pair, said: bytes) -> socket.socket:
    """Say it to `b`."""
    connection = socket.create_connection(("127.0.0.1", servers.ports["b"]), SOON_S)
    connection.sendall(said)
    return connection


def answer_to(servers: Pair, said: bytes) -> Answer:
    """What `b` answers."""
    with say(servers, said) as connection:
        received = b""
        while not (head := re.match(rb"(?s)HTTP/1.1 200.*content-length: (\d+)\r\n.*?\r\n\r\n", received)) or (
            len(received) < head.end() + int(head[1])
        ):
            part = connection.recv(1 << 16)
            assert part, received
            received += part
        return msgspec.msgpack.decode(received[head.end() :], type=Answer)


def repeat_offer(servers: Pair, said: bytes) -> socket.socket:
    """Repeat an offer and the session itself, once the offer is answered."""
    end = said.index(b"\r\n\r\n") + 4
    length = re.search(rb"content-length: (\d+)", said[:end])
    assert length is not None
    end += int(length[1])
    connection = say(servers, said[:end])
    received = b""
    while b"\r\n\r\n" not in received:
        part = connection.recv(1 << 16)
        assert part, received
        received += part
    assert received.startswith(b"HTTP/1.1 101 ")
    connection.sendall(said[end:])
    return connection


def test_what_is_repeated_is_not_taken_and_publishes_nothing(tmp_path: Path) -> None:
    with listened(tmp_path, loses=COMMIT) as (servers, listener):
        b = servers.clients["b"]
        session = used_session(servers.clients["a"])
        assert code(servers.move(session)) == (503, "move_unsettled")
        assert servers.settled(session) == "a"
        with repeat_offer(servers, listener.heard(OFFER)) as connection:
            assert connection.recv(1) == b"", "b has received it all"
        assert answer_to(servers, listener.heard(COMMIT)).taken is Taken.NO
        assert servers.owners(session) == ["a"]
        assert generate(b, open_session(b), [*PROMPT, 1])["usage"]["cached_tokens"] == 0
