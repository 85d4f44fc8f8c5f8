"""What a command writes to: a terminal that is drawn anew, or plain lines."""

import itertools
import time
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console, RenderableType
from rich.live import Live

from client.shell.ending import ended_in_order

REFRESH_S = 1.0
ANY_WIDTH = 10_000
"""Nothing is cut where no terminal is."""


def make_console() -> Console:
    """For standard output. Where that is no terminal, it has no colours and no end of a line."""
    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else Console(width=ANY_WIDTH, highlight=False, markup=False, emoji=False)


def refresh(console: Console, draw: Callable[[], RenderableType], *, count: int | None = None) -> None:
    """Draw once a second: `count` times, or until Ctrl-C or SIGTERM.

    Without a `count`, a terminal shows it on its other screen, and has its own back at the end, whatever the end is.
    """
    with ended_in_order():
        if count is None and console.is_terminal and not console.is_dumb_terminal:
            _refresh_screen(console, draw)
        for number in itertools.count() if count is None else range(count):
            if number:
                time.sleep(REFRESH_S)
                console.print()
            console.print(draw())
            console.file.flush()


def _refresh_screen(console: Console, draw: Callable[[], RenderableType]) -> NoReturn:
    with Live(draw(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(draw(), refresh=True)
