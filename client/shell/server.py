"""Which server a command talks to, and what is said when that fails."""

import os
import sys
from collections.abc import Callable

from client._sync.client import Djinn
from client.edge import KEY_VARIABLE, URL_VARIABLE, address_of
from client.errors import ConnectionFailed, DjinnError, Unauthorized
from client.shell.wording import on_one_line

FAILED, MISUSED = 1, 2
"""Exit statuses: the server refused or could not be reached; the user was wrong."""
ANSWER_TIMEOUT_S = 30.0


def on_server(url: str | None, command: Callable[[Djinn], int], *, timeout: float | None = ANSWER_TIMEOUT_S) -> int:
    """Run `command` with the server at `url`, or else at `DJINN_BASE_URL`. Returns its exit status.

    A key comes from `DJINN_API_KEY` alone: all users of the machine can read the arguments of a process.

    What goes wrong is one line on standard error: then the status is 1, or 2 for an address or key that cannot be one.
    `timeout` is how long the server may be silent, in seconds.
    """
    _write_any_text()
    try:
        djinn = Djinn(url or None, timeout=timeout, max_retries=0)
    except ValueError as error:
        complain(str(error).replace("base_url", f"--url or {URL_VARIABLE}").replace("api_key", KEY_VARIABLE))
        return MISUSED
    try:
        with djinn:
            return command(djinn)
    except DjinnError as error:
        complain(explain(error, address_of(url or None)))
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def explain(error: DjinnError, address: str) -> str:
    """What went wrong, and what to do about it, on one line."""
    match error:
        case ConnectionFailed():
            reason = error.message.partition(": ")[2] or error.message
            advice = f"Start one with djinn serve, or name another with --url or {URL_VARIABLE}"
            return f"no server answers at {address} ({on_one_line(reason)}). {advice}"
        case Unauthorized() if os.environ.get(KEY_VARIABLE):
            return f"{address} does not take the key in {KEY_VARIABLE}"
        case Unauthorized():
            return f"{address} wants an API key: put it into {KEY_VARIABLE}"
    return on_one_line(error.message)


def complain(text: str) -> None:
    """One line on standard error."""
    print(f"djinn: {text}", file=sys.stderr)


def _write_any_text() -> None:
    """A character that the terminal's encoding lacks becomes a `?`, and never an error. So does a byte that is none."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
