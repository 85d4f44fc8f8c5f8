"""`djinn top`: what a server does, each second."""

from dataclasses import replace

from rich.console import Console, RenderableType

from client._sync.client import Djinn
from client.shell.overview import overview
from client.shell.rates import Look, look, rates_between
from client.shell.screen import make_console, refresh
from client.shell.server import on_server


def top(url: str | None, *, count: int | None = None) -> int:
    """Show the memory, the turns and the busiest sessions of the server at `url`: `count` times, or until Ctrl-C.

    Returns the exit status.
    """

    def command(djinn: Djinn) -> int:
        console = make_console()
        (model, *_) = djinn.models()
        view = _View(djinn, model.id, console)
        refresh(console, view.draw, url, count=count)
        return 0

    return on_server(url, command)


class _View:
    """What is drawn, from the last two looks."""

    def __init__(self, djinn: Djinn, model: str, console: Console) -> None:
        self._djinn = djinn
        self._model = model
        self._console = console
        self._last: Look | None = None

    def draw(self) -> RenderableType:
        """Look again. After the first look no speed is known yet."""
        now = look(self._djinn)
        if now.memory is None and self._last is not None:
            now = replace(now, memory=self._last.memory)
        rates = None if self._last is None else rates_between(self._last, now)
        self._last = now
        return overview(self._model, now, rates, self._console)
