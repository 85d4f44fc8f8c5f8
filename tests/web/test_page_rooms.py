"""Which files of the page know what: those that make texts of numbers are given what they need."""

from __future__ import annotations

import re
from pathlib import Path

import app

LIBRARY = Path(app.__path__[0]) / "static" / "lib"
CALLS = "api.js"
"""It sends the key, and says that the server is away."""
IMPORTED = re.compile(r'from "(\.[^"]*)"')


def test_the_library_of_the_page_knows_no_state() -> None:
    files = [path for path in LIBRARY.glob("*.js") if path.name != CALLS]
    assert files
    reached = {
        (path.name, name) for path in files for name in IMPORTED.findall(path.read_text()) if not name.startswith("./")
    }
    assert not reached
