"""The browser that looks at the page."""

import shutil

from loadgen.errors import LoadgenError

ARGUMENTS = ("--no-sandbox", "--disable-gpu")


def find_chromium() -> str:
    """Its path. Raises `LoadgenError` without one."""
    path = shutil.which("chromium")
    if path is None:
        raise LoadgenError("Chromium must be installed: apt-get install chromium")
    return path
