"""The two ends of a conversation: lines of the user, and what is shown to them."""

import importlib
import sys
from contextlib import suppress

from rich.console import Console, RenderableType

from client.shell.screen import make_console
from client.shell.server import complain
from client.shell.wording import harmless

DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"


class Terminal:
    """Answers and what commands find go to standard output. Notices go to standard error, so that the answers can be
    kept in a file.
    """

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        """Whether a user types, and wants to go on after a mistake."""
        self._results = make_console()
        self._notices = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._is_mid_line = False
        if self.is_interactive:
            with suppress(ImportError):  # a Python without readline edits no lines, and works
                importlib.import_module("readline")

    def ask(self, prompt: str) -> str | None:
        """The next line, without its end; None after the last."""
        try:
            return input(prompt if self.is_interactive else "")
        except EOFError:
            if self.is_interactive:
                print()
            return None

    def stream(self, text: str, *, is_thought: bool = False) -> None:
        """A part of an answer, as it comes; thoughts are dimmed."""
        if text:
            shown = harmless(text)
            if is_thought and not self._results.is_dumb_terminal:
                shown = f"{DIM}{shown}{NOT_DIM}"
            print(shown, end="", flush=True)
            self._is_mid_line = not text.endswith("\n")

    def end_line(self) -> None:
        """Begin a new line, if one has begun."""
        if self._is_mid_line:
            print(flush=True)
            self._is_mid_line = False

    def show(self, found: RenderableType) -> None:
        """What a command was asked for."""
        self._results.print(found, soft_wrap=isinstance(found, str))
        self._results.file.flush()

    def note(self, text: str) -> None:
        """Something to know besides. A program that reads the answers does without."""
        self.end_line()
        if self.is_interactive:
            self._notices.print(text, style="dim")

    def complain(self, text: str) -> None:
        """What went wrong."""
        self.end_line()
        complain(text)
