"""What is wrong with a server, for who has ten seconds: the sentences that `djinn top` begins with."""

from collections.abc import Iterator

from client.shell.rates import Look
from client.shell.session_table import name_of, short_id
from client.shell.wording import counted, on_one_line, size, span

LATE_S, SILENT_S = 2.0, 60.0
"""How late a client, and how long a session without a turn or a signal holds the device, before it is said."""
NEARLY_FULL, CROWDED = 0.95, 0.6
"""Shares of a tier: nearly full, and as full as it is worth to look for who holds it."""


def findings(now: Look) -> Iterator[str]:
    """Each in one line, the gravest first."""
    if now.unready is not None:
        yield f"not ready: {on_one_line(now.unready)}"
    memory = now.memory
    if memory.turns_waiting:
        line = f"{counted(memory.turns_waiting, 'turn')} in the queue"
        for tenant, use in (memory.tenants or {}).items():
            if 1 < memory.turns_waiting < 2 * use.turns_waiting:
                line += f", {use.turns_waiting} of them of tenant {on_one_line(tenant)}"
        yield line
    device = memory.data.device
    silent = [info for info in now.idle if info.phase == "compute" and now.unix_s - info.used_at > SILENT_S]
    if silent and device.owned_bytes >= CROWDED * device.total_bytes:
        held = sum(info.kv.device_bytes for info in silent)
        worst = max(silent, key=lambda info: info.kv.device_bytes)
        yield (
            f"{counted(len(silent), 'session')} without a turn or a signal for a minute: {size(held)}, "
            f"{held / device.total_bytes:.0%} of the device; {_called(worst.id, name_of(worst))} most"
        )
    late = [info for info in now.idle if info.returns_at is not None and now.unix_s - info.returns_at > LATE_S]
    if late:
        worst = min(late, key=lambda info: info.returns_at or 0.0)
        behind = span(now.unix_s - (worst.returns_at or 0.0))
        yield f"{counted(len(late), 'client')} later than announced: {_called(worst.id, name_of(worst))} by {behind}"
    for tier in ("host", "disk"):
        use = getattr(memory.data, tier)
        if use.total_bytes and use.owned_bytes >= NEARLY_FULL * use.total_bytes:
            yield f"{tier}: sessions hold {use.owned_bytes / use.total_bytes:.0%} of it"


def _called(session: str, name: str) -> str:
    return short_id(session) if name == "-" else name
