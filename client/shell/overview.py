"""What `djinn top` draws."""

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from client.memory_models import Direction, MemoryMap, TierUse
from client.shell.rates import Look, Rates
from client.shell.session_table import GAP, Row, fitting_table, kv_bytes
from client.shell.wording import counted, on_one_line, size

BAR_WIDTH = 20
WIDE = 80
"""Cells of a terminal that has room for bars and moves."""
WAYS: dict[str, tuple[tuple[str, Direction], ...]] = {
    "device": (("to host", "out"), ("from host", "in")),
    "host": (),
    "disk": (("to disk", "to_disk"), ("from disk", "from_disk")),
}
"""The moves that the line of a tier tells of."""
LINES_ABOVE = 9
"""Above the sessions: three of the server, four of the tiers, and a blank one after each."""
RANKS = {"running": 0, "queued": 1, "paused": 2}


def overview(model: str, now: Look, rates: Rates | None, console: Console) -> RenderableType:
    """The server in a few lines, each tier, and as many of the busiest sessions as the terminal has lines for."""
    speeds = {} if rates is None else rates.tokens
    rows = [Row(info, now.unix_s - info.used_at, speeds.get(info.id)) for info in now.busy.values()]
    sessions = fitting_table(sorted(rows, key=_rank), console, console.height - LINES_ABOVE, with_rates=True)
    return Group(*_server(model, now, rates), Text(), _tiers(now.memory, rates, console), Text(), sessions)


def _rank(row: Row) -> tuple[int, float, int]:
    """Those that run come first, the fastest of them before the others, then those that hold the most."""
    return RANKS.get(row.info.state, len(RANKS)), -(row.tokens_per_s or 0.0), -kv_bytes(row.info)


def _server(model: str, now: Look, rates: Rates | None) -> list[Text]:
    memory, text = now.memory, now.memory.text
    paused = sum(info.state == "paused" for info in now.busy.values())
    speed = "-" if rates is None else f"{rates.all_tokens:.1f}"
    lines = [
        f"{on_one_line(model)}: {counted(memory.sessions, 'session')}, KV policy {memory.policy}",
        f"turns: {memory.turns_running} running, {memory.turns_waiting} waiting, {paused} paused; {speed} tokens/s",
        f"weights: {size(text.kept_bytes + text.ring_bytes)} of {size(text.total_bytes)} on the device",
    ]
    if text.ring_bytes:
        lines[-1] += f", {_rate(None if rates is None else rates.streamed_bytes)} streamed"
    return [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]


def _tiers(memory: MemoryMap, rates: Rates | None, console: Console) -> Table:
    """A line for each tier: how full it is, what sessions hold, what is kept for reuse, and what moves."""
    is_wide, has_bars = console.width >= WIDE, console.is_terminal and console.width >= WIDE
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    table.add_column("KV")
    if has_bars:
        table.add_column("", width=BAR_WIDTH)
    for title in ("FULL", "HELD", "CACHED", "ROOM"):
        table.add_column(title, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("MOVES", no_wrap=True, overflow="ellipsis")
    for name, ways in WAYS.items():
        tier: TierUse = getattr(memory.data, name)
        used = tier.owned_bytes + tier.cached_bytes
        full = f"{used / tier.total_bytes:.0%}" if tier.total_bytes else "-"
        bar = [ProgressBar(tier.total_bytes or 1, used, width=BAR_WIDTH)] if has_bars else []
        moves = [_moves(ways, memory, rates)] if is_wide else []
        table.add_row(name, *bar, full, size(tier.owned_bytes), size(tier.cached_bytes), size(tier.total_bytes), *moves)
    return table


def _moves(ways: tuple[tuple[str, Direction], ...], memory: MemoryMap, rates: Rates | None) -> str:
    """How fast KV moves each way; nothing where the server does not tell this key."""
    told = [(words, way) for words, way in ways if way in memory.moves]
    return ", ".join(f"{words} {_rate(None if rates is None else rates.moved_bytes.get(way))}" for words, way in told)


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{size(bytes_per_s)}/s"
