"""Text, sizes and times as a terminal shows them."""

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that would move the cursor, change colours, retitle the window or turn the direction of what follows. Line
ends and tabs are none of them.
"""
UNITS = ("KiB", "MiB", "GiB", "TiB")
SPANS = (("d", 86400), ("h", 3600), ("m", 60))
LATE = " late"
SPACES = str.maketrans({" ": "·", "\n": "↵", "\t": "→"})


def harmless(text: str) -> str:
    """Text from clients and models, without what a terminal would obey."""
    return CONTROL.sub("�", text)


def on_one_line(text: str) -> str:
    """The same on one line, with single spaces."""
    return " ".join(harmless(text).split())


def visible(text: str) -> str:
    """A token, on one line and with its spaces."""
    return harmless(text).translate(SPACES)


def counted(count: int, noun: str) -> str:
    """ "1 session", "2 sessions"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size(num_bytes: float) -> str:
    """In powers of 1024: "0 B", "16.0 KiB", "1.5 GiB"."""
    power = min(int(num_bytes).bit_length() - 1, 10 * len(UNITS)) // 10
    return f"{num_bytes / (1 << 10 * power):.1f} {UNITS[power - 1]}" if power > 0 else f"{num_bytes:.0f} B"


def turn(state: str) -> str:
    """What the turn of a session in this state does: a session that is `idle` has none."""
    return "none" if state == "idle" else state


def span(seconds: float) -> str:
    """In its largest whole unit: "3s", "5m", "2h", "4d". A clock that is behind the server's gives "0s"."""
    for unit, length in SPANS:
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def due(seconds: float) -> str:
    """When something happens that is expected in so many seconds: "in 5s", or "2m late"."""
    return f"in {span(seconds)}" if seconds >= 0 else f"{span(-seconds)}{LATE}"
