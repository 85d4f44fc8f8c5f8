"""Who looks at the server while its agents run."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright

from benchmarks.page.chromium import ARGUMENTS, find_chromium
from loadgen.errors import LoadgenError

NOBODY, READER, PAGE = "nobody", "a reader", "the page"
IDLE = ("chrt", "--idle", "0")
"""The browser only gets processor time that nobody else wants: whoever looks does so from a machine of their own."""
BLANK = "about:blank"

Look = Callable[[str], None]
"""Has another one look from now on."""


@contextmanager
def lookers(url: str) -> Iterator[Look]:
    """The three of them; nobody looks at first. A reader takes the page's stream of events, and draws nothing.

    Raises `LoadgenError` without a browser, or for errors on the page.
    """
    path = find_chromium()
    errors: list[str] = []
    readers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        wrapper = Path(folder) / "chromium"
        wrapper.write_text(f'#!/bin/sh\nexec {" ".join(IDLE)} {path} "$@"\n')
        wrapper.chmod(0o700)
        with playwright.chromium.launch(executable_path=wrapper, args=ARGUMENTS) as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.on("pageerror", lambda error: errors.append(str(error)))

            def look(who: str) -> None:
                while readers:
                    with readers.pop() as reader:
                        reader.kill()
                page.goto(url if who == PAGE else BLANK)
                if who == PAGE:
                    page.get_by_role("heading", name="Sessions").first.wait_for()
                if who == READER:
                    stream = ["curl", "--silent", "--no-buffer", f"{url}/v1/events"]
                    readers.append(subprocess.Popen(stream, stdout=subprocess.DEVNULL))

            try:
                yield look
                look(NOBODY)
            except PlaywrightError as error:
                raise LoadgenError(f"the page did not open: {error.message}") from error
    if errors:
        raise LoadgenError(f"the page had an error: {errors[0]}")
