"""A Djinn server's memory map."""

from client import MemoryMap
from client.calls import memory
from client.transport import AsyncTransport
from loadgen.load.records import Moves, ServerTotals
from loadgen.sampling.reading import Reading


class DjinnReader:
    """Reads `/v1/memory`."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def read(self) -> Reading:
        return to_reading(await self._transport.send(memory()))

    async def close(self) -> None:
        await self._transport.close()


def to_reading(found: MemoryMap) -> Reading:
    """A memory map as a reading. Bytes are those that sessions own: what is only kept for reuse gives way to them."""
    data = found.data
    return Reading(
        sessions={str(tier): count for tier, count in found.sessions_by_tier.items()},
        bytes={tier: getattr(data, tier).owned_bytes for tier in ("device", "host", "disk")},
        running=found.turns_running,
        waiting=found.turns_waiting,
        kv_used=data.device.owned_bytes / data.device.total_bytes,
        totals=ServerTotals(
            {way: Moves(moves.count, moves.bytes, moves.seconds) for way, moves in found.moves.items()},
            {} if found.counts is None else found.counts.model_dump(),
        ),
    )
