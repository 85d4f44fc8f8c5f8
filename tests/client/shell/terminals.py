"""`djinn` in a pseudo-terminal, as somebody sees it who types."""

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.processes import hear_interrupts

WAIT_S = 60
CTRL_C, CTRL_D = "\x03", "\x04"
STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """A running command and its terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self._process = process
        self._master = master
        self.raw = ""
        """All that it has written."""
        self.is_open = True
        self._read = 0

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def hang_up(self) -> int:
        """Close the terminal; returns the exit status."""
        os.close(self._master)
        self.is_open = False
        return self._process.wait(WAIT_S)

    def expect(self, pattern: str, within_s: float = WAIT_S) -> re.Match[str]:
        """Wait for text after what was last expected, colours aside."""
        deadline = time.monotonic() + within_s
        while not (found := re.compile(pattern).search(self.text, self._read)):
            assert self._more(deadline), f"{pattern} is not in {self.text[self._read :]!r}"
        self._read = found.end()
        return found

    def interrupt(self, pattern: str) -> None:
        """Type Ctrl-C until it is answered: Python's readline does not notice one that comes just before it waits."""
        for _ in range(10):
            self.type(CTRL_C)
            with contextlib.suppress(AssertionError):
                self.expect(pattern, WAIT_S / 10)
                return
        raise AssertionError(f"Ctrl-C is not answered by {pattern}")

    @property
    def text(self) -> str:
        """What it has written, without colours."""
        return STYLE.sub("", self.raw)

    def end(self) -> int:
        """Read to the end; returns the exit status."""
        deadline = time.monotonic() + WAIT_S
        while self._more(deadline):
            pass
        return self._process.wait(WAIT_S)

    def _more(self, deadline: float) -> bool:
        """Wait for more; False after the end, or after too long."""
        if not select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # how Linux ends a pseudo-terminal
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)


@contextmanager
def djinn_in_terminal(*arguments: str, columns: int = 100, lines: int = 30, **variables: str) -> Iterator[Terminal]:
    """`djinn` with a terminal of that size; it is killed at the end of the block."""
    master, own = os.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def take_terminal() -> None:
        hear_interrupts()
        os.login_tty(own)

    command = [sys.executable, "-m", "app", *arguments]
    unwanted = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"}
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    process = subprocess.Popen(
        command, env={**inherited, "TERM": "xterm-256color", **variables}, preexec_fn=take_terminal, pass_fds=[own]
    )
    os.close(own)
    terminal = Terminal(process, master)
    try:
        yield terminal
    finally:
        process.kill()
        process.wait()
        if terminal.is_open:
            os.close(master)
