"""What Python would write on standard error by itself: warnings, and uncaught errors."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from types import TracebackType
from typing import TextIO

logger = logging.getLogger(__name__)


def log_uncaught() -> None:
    """Have it logged from now on, as lines like all others."""
    warnings.showwarning = _log_warning
    sys.excepthook = _log_error
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_threads_error


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """As `warnings.showwarning` is called; `file` and `line` are for texts of another form."""
    logger.warning("%s: %s (%s, line %d)", category.__name__, message, filename, lineno)


def _log_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):  # Ctrl-C is no bug
        sys.__excepthook__(kind, error, trace)
    else:
        logger.critical("an error has ended the process", exc_info=(kind, error, trace))


def _log_unraisable(found: sys.UnraisableHookArgs) -> None:
    logger.error(
        "%s: %r", found.err_msg or "an error could not be raised", found.object, exc_info=found.exc_value or True
    )


def _log_threads_error(found: threading.ExceptHookArgs) -> None:
    if not issubclass(found.exc_type, SystemExit):
        name = "a thread" if found.thread is None else f"the thread {found.thread.name}"
        logger.critical("an error has ended %s", name, exc_info=found.exc_value or True)
