"""Whether it is faster to make KV smaller, send that and restore it, than to send it as it is."""

from collections.abc import Iterable
from dataclasses import dataclass

from loadgen.experiments.kv.codecs import Compression
from loadgen.experiments.kv.links import Link


@dataclass(frozen=True, slots=True)
class Payoff:
    """One session's KV over one link, in seconds.

    `plain_s` as it is. `in_turn_s`: pack all, send all, unpack all. `pipelined_s`: the three at once on pieces of the
    KV, so that the slowest decides; filling and draining the pipeline is left out, which favours packing.
    """

    link: str
    codec: str
    plain_s: float
    in_turn_s: float
    pipelined_s: float


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The speeds of a link, in bytes/s, below which a codec pays: 0 is never."""

    codec: str
    in_turn: float
    pipelined: float


def weigh(links: Iterable[Link], compressions: Iterable[Compression]) -> tuple[Payoff, ...]:
    """Every codec over every link."""
    kept = tuple(compressions)
    return tuple(_over(link, found) for link in links for found in kept)


def _over(link: Link, found: Compression) -> Payoff:
    send_s = link.seconds(found.packed_bytes)
    return Payoff(
        link.name,
        found.codec,
        plain_s=link.seconds(found.raw_bytes),
        in_turn_s=found.pack_s + send_s + found.unpack_s,
        pipelined_s=max(found.pack_s, send_s, found.unpack_s),
    )


def break_even(found: Compression) -> BreakEven:
    """Where the two ways take the same time.

    In turn, what is saved on the link is the time to pack and unpack: (raw - packed) / speed = pack + unpack.
    Pipelined, the slower of packing and unpacking is as slow as the link with the raw bytes.
    """
    saved = found.raw_bytes - found.packed_bytes
    if saved <= 0:
        return BreakEven(found.codec, 0.0, 0.0)
    return BreakEven(
        found.codec,
        in_turn=saved / (found.pack_s + found.unpack_s),
        pipelined=found.raw_bytes / max(found.pack_s, found.unpack_s),
    )
