"""What `djinn top` draws."""

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from client.memory_models import Direction, MemoryMap, TierUse
from client.shell.rates import Look, Rates
from client.shell.session_table import GAP, Row, fitting_table, kv_bytes
from client.shell.wording import counted, on_one_line, size

BAR_WIDTHS = 6, 20
WITHOUT_BAR = 74
"""Cells of the other columns of a tier's line."""
WAYS: dict[str, tuple[Direction, ...]] = {"device": ("out", "in"), "host": (), "disk": ("to_disk", "from_disk")}
"""The moves that the line of a tier tells of: away from the device, and towards it."""
ALARMS = ((0.95, "red"), (0.8, "yellow"), (0.0, "green"))
"""Colours of a bar from that share on."""
LINES_ABOVE = 9
"""Above the sessions: three of the server, four of the tiers, and a blank one after each."""
LEAST_BELOW = 5
"""Lines that what is wrong leaves to the sessions."""
RANKS = {"running": 0, "queued": 1, "paused": 2}


def overview(model: str, now: Look, rates: Rates | None, console: Console) -> RenderableType:
    """What is wrong, the server in a few lines, each tier, and as many of the busiest sessions as the screen shows."""
    wrong = _wrong(now, console)
    speeds = {} if rates is None else rates.tokens
    rows = [Row(info, now.unix_s, speeds.get(info.id)) for info in now.busy.values()]
    sessions = fitting_table(
        sorted(rows, key=_rank), console, console.height - LINES_ABOVE - len(wrong), with_rates=True
    )
    if now.memory is None:
        return Group(*wrong, Text(), sessions)
    tiers = _tiers(now.memory, rates, console)
    return Group(*wrong, *_server(model, now, now.memory, rates), Text(), tiers, Text(), sessions)


def _wrong(now: Look, console: Console) -> list[Text]:
    """What is wrong, each in at most two lines, and as much of it as leaves room for some sessions."""
    texts = [each.text for each in now.findings.data]
    if now.silence and not any(each.kind == "unready" for each in now.findings.data):
        texts.insert(0, f"the engine does not tell of its memory: {now.silence}")
    room, lines = console.height - LINES_ABOVE - LEAST_BELOW, list[Text]()
    for number, text in enumerate(texts):
        wrapped = Text(f"! {on_one_line(text)}", style="red").wrap(console, console.width)[:2]
        if console.is_terminal and len(lines) + len(wrapped) > max(2, room):
            lines.append(Text(f"! and {counted(len(texts) - number, 'finding')} more", style="red"))
            break
        lines.extend(wrapped)
    return lines


def _rank(row: Row) -> tuple[int, float, int]:
    """Those that run come first, the fastest of them before the others, then those that hold the most."""
    return RANKS.get(row.info.state, len(RANKS)), -(row.tokens_per_s or 0.0), -kv_bytes(row.info)


def _server(model: str, now: Look, memory: MemoryMap, rates: Rates | None) -> list[Text]:
    text = memory.text
    paused = sum(info.state == "paused" for info in now.busy.values())
    speed = "-" if rates is None else f"{rates.all_tokens:.1f}"
    lines = [
        f"{on_one_line(model)}: {counted(memory.sessions, 'session')}, KV policy {memory.policy}{_room(now)}",
        f"turns: {memory.turns_running} running, {memory.turns_waiting} waiting, {paused} paused; {speed} tokens/s",
        f"weights: {size(text.kept_bytes + text.ring_bytes)} of {size(text.total_bytes)} on the device",
    ]
    if text.ring_bytes:
        lines[-1] += f", {_rate(None if rates is None else rates.streamed_bytes)} streamed"
    return [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]


def _room(now: Look) -> str:
    capacity = now.findings.capacity
    return "" if capacity is None else f"; room for {capacity.more} more like these"


def _tiers(memory: MemoryMap, rates: Rates | None, console: Console) -> Table:
    """A line for each tier: what sessions hold, also as a bar, what is kept for reuse, and how fast KV moves down from
    there and up to there.
    """
    least, most = BAR_WIDTHS
    width = min(most, console.width - WITHOUT_BAR)
    has_bars = console.is_terminal and width >= least
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    table.add_column("PLACE")
    if has_bars:
        table.add_column("", width=width)
    for title in ("FULL", "HELD", "CACHED", "ROOM", "DOWN/S", "UP/S"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, ways in WAYS.items():
        tier: TierUse = getattr(memory.data, name)
        used = tier.owned_bytes + tier.cached_bytes
        full = f"{used / tier.total_bytes:.0%}" if tier.total_bytes else "-"
        bar = [_bar(tier, width)] if has_bars else []
        moves = [size(rates.moved_bytes[way]) if rates and way in rates.moved_bytes else "-" for way in ways]
        table.add_row(name, *bar, full, size(tier.owned_bytes), size(tier.cached_bytes), size(tier.total_bytes), *moves)
    return table


def _bar(tier: TierUse, width: int) -> ProgressBar:
    """What sessions hold of the tier: what is only kept for reuse makes room at once."""
    held = tier.owned_bytes / tier.total_bytes if tier.total_bytes else 0.0
    color = next(color for share, color in ALARMS if held >= share)
    return ProgressBar(1.0, held, width=width, complete_style=color, finished_style=color)


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{size(bytes_per_s)}/s"
