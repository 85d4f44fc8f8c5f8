"""A session that is parked, comes back, grows and is parked again: what the second park copies."""

from dataclasses import dataclass

from benchmarks.kv.turns import extend, fetch, park
from benchmarks.text import TokenSource
from client import Djinn, Session


@dataclass(frozen=True, slots=True)
class ParkedTwice:
    """Bytes of one session that left the device up to its first park, and from there to its second."""

    first_bytes: int
    second_bytes: int


def measure_parks(client: Djinn, source: TokenSource, sessions: int, *, tokens: int, growth: int) -> list[ParkedTwice]:
    """Sessions of `tokens` tokens that grow by `growth`, the generated ones included, one after the other.

    Raises ServerFailedError if KV does not move as it is told to, or is lost.
    """
    return [_park_twice(client, source, tokens, growth) for _ in range(sessions)]


def _park_twice(client: Djinn, source: TokenSource, tokens: int, growth: int) -> ParkedTwice:
    with client.sessions.create() as session:
        extend(session, source.take(tokens - 1))
        first = _parked_bytes(session)
        fetch(session)
        extend(session, source.take(growth - 1))
        return ParkedTwice(first, _parked_bytes(session) - first)


def _parked_bytes(session: Session) -> int:
    """Bytes that have left the device when a park is over, those that left early included."""
    park(session)
    return session.info.usage.bytes_out
