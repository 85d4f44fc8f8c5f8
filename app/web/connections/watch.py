"""Ends connections whose clients keep the server waiting."""

import asyncio

from app.metrics.connections import ConnectionMetrics, Ended
from app.web.connections.protocol import Deadlines, HttpProtocol
from app.web.connections.table import ConnectionTable

LOOKS = 4
"""Looks at every connection within the shortest deadline. A timer for each would be set anew with every packet."""


async def watch(table: ConnectionTable, deadlines: Deadlines, metrics: ConnectionMetrics) -> None:
    """End what is overdue, for ever."""
    interval_s = min(deadlines.header_s, deadlines.body_s, deadlines.write_s) / LOOKS
    while True:
        await asyncio.sleep(interval_s)
        end_overdue(table, deadlines, metrics, asyncio.get_running_loop().time())


def end_overdue(table: ConnectionTable, deadlines: Deadlines, metrics: ConnectionMetrics, now: float) -> None:
    """End what is overdue at `now`, in s of the event loop's clock."""
    for connection in table:
        if connection.stalled_s(now) > deadlines.write_s:
            metrics.count_ended(Ended.UNREAD)
            connection.reset()
            continue
        protocol = None if connection.transport is None else connection.transport.get_protocol()
        if isinstance(protocol, HttpProtocol) and (cause := protocol.overdue(now, deadlines)) is not None:
            metrics.count_ended(cause)
            protocol.time_out()
