"""A connection that is used in parts, between which its other end may go or the engine may give it up."""

import socket
from collections.abc import Iterator

import pytest

from app.machine.handover import SocketTable
from tests.waiting import wait_until


@pytest.fixture
def there() -> Iterator[tuple[SocketTable, socket.socket]]:
    """A table with socket 1, and the other end of that."""
    table, (ours, theirs) = SocketTable(), socket.socketpair()
    table.put(1, ours)
    with theirs:
        theirs.settimeout(5)
        yield table, theirs
    table.close()


def test_a_socket_that_is_kept_can_be_taken_again(there: tuple[SocketTable, socket.socket]) -> None:
    table, theirs = there
    for part, keep in ((b"one", True), (b"two", False)):
        with table.take(1, keep=keep) as taken:
            taken.sendall(part)
        assert theirs.recv(3) == part
    assert theirs.recv(1) == b""
    with pytest.raises(OSError, match="given up"), table.take(1):
        pass


@pytest.mark.parametrize("how", ["fails", "discarded in use", "discarded", "closed in use", "closed"])
def test_a_socket_is_not_kept_after_an_error_or_its_end(there: tuple[SocketTable, socket.socket], how: str) -> None:
    table, theirs = there
    act = {"discarded": lambda: table.discard(1), "closed": table.close}.get(how.removesuffix(" in use"))
    try:
        with table.take(1, keep=True) as taken:
            if how == "fails":
                raise ConnectionError
            if act is not None and how.endswith("in use"):
                act()
                assert taken.recv(1) == b"", "its user learns of it"
    except ConnectionError:
        assert how == "fails"
    if act is not None:
        act()
    assert theirs.recv(1) == b""
    with pytest.raises(OSError, match="given up"), table.take(1):
        pass


def test_an_end_that_goes_away_is_seen(there: tuple[SocketTable, socket.socket]) -> None:
    table, theirs = there
    with table.take(1, keep=True):
        assert not table.is_ended(1)
        assert not table.is_ended(2), "it has not come"
        theirs.close()
        wait_until(lambda: table.is_ended(1))
    assert table.is_ended(1)
