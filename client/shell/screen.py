"""What a command writes to: a terminal that is drawn anew, or plain lines."""

import itertools
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from client.edge import address_of
from client.errors import DjinnError
from client.shell.ending import ended_in_order
from client.shell.server import explain

try:
    import termios
    import tty
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

REFRESH_S = 1.0
ANY_WIDTH = 10_000
"""Nothing is cut where no terminal is."""


def make_console() -> Console:
    """For standard output. Where that is no terminal, it has no colours and no end of a line."""
    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else Console(width=ANY_WIDTH, highlight=False, markup=False, emoji=False)


def refresh(console: Console, draw: Callable[[], RenderableType], url: str | None, *, count: int | None = None) -> None:
    """Draw once a second what the server at `url` tells: `count` times, or until `q`, Ctrl-C or SIGTERM.

    Without a `count`, a terminal shows it on its other screen, and has its own back at the end, whatever the end is.
    Then a server that goes away after the first picture does not end it: who watches wants to see it come back.
    """
    if count is None:
        draw = _lasting(draw, url)
    with ended_in_order():
        if count is None and console.is_terminal and not console.is_dumb_terminal:
            _refresh_screen(console, draw)
            return
        for number in itertools.count() if count is None else range(count):
            if number:
                time.sleep(REFRESH_S)
                console.print()
            console.print(draw())
            console.file.flush()


def _lasting(draw: Callable[[], RenderableType], url: str | None) -> Callable[[], RenderableType]:
    """Draws the same; while that fails, the last picture under a line that says why."""
    last: RenderableType | None = None

    def draw_or_tell() -> RenderableType:
        nonlocal last
        try:
            last = draw()
        except DjinnError as error:
            if last is None:
                raise
            return Group(Text(f"! {explain(error, address_of(url or None))}", style="red"), last)
        return last

    return draw_or_tell


def _refresh_screen(console: Console, draw: Callable[[], RenderableType]) -> None:
    with _keys() as typed_within, Live(draw(), console=console, screen=True, auto_refresh=False) as live:
        while b"q" not in typed_within(REFRESH_S).lower():
            live.update(draw(), refresh=True)


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """Yields what waits at most so many seconds for keys, and returns them: in the block they need no Enter."""

    def typed_within(seconds: float) -> bytes:
        if has_keys and select.select([sys.stdin], [], [], seconds)[0]:
            return os.read(sys.stdin.fileno(), 64)
        if not has_keys:
            time.sleep(seconds)
        return b""

    has_keys = termios is not None and sys.stdin.isatty()
    if termios is None or not has_keys:
        yield typed_within
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield typed_within
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
