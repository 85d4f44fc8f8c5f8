"""Where each file of the repository is in the site, and its links there.

Pages of docs/ are at the root, and so are the pages that its notebooks become. A file elsewhere comes along if a page
links to it, at its path in the repository.
"""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

from docs.site.notebook_page import notebook_page

ROOT = Path(__file__).parents[2]
KINDS = {".md", ".ipynb", ".png", ".webp", ".svg", ".css", ".js", ".json", ".txt"}
ADDED = {"app/static/icon.svg": "images/djinn.svg"}
"""Files that no page links to."""
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""The head of results: their many tables would come before the pages that explain them."""
ROW, CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]*`")
"""GitHub needs a bar of code in a table escaped, the site shows the escape."""
GLOSSARY = "glossary.md"
LINK = re.compile(r"(\]\()(?![a-z]+:)([^)#\s]+)")


def site_files() -> dict[str, bytes]:
    """Each file of the site by its path there, pages with the links that hold there.

    Raises `FileNotFoundError` if a page links to a file that is not there.
    """
    found = {place: (ROOT / source).read_bytes() for source, place in ADDED.items()}
    waiting = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*") if path.suffix in KINDS]
    while waiting:
        source = waiting.pop()
        if (place := site_path(source)) in found:
            continue
        found[place] = (ROOT / source).read_bytes()
        if source.endswith(".ipynb"):
            page, pictures = notebook_page(source, found[place])
            found[place] = page.encode()
            found |= {site_path(picture): content for picture, content in pictures.items()}
        if place.endswith(".md"):
            text, linked = _moved(source, found[place].decode())
            found[place] = (text if source.startswith("docs/") else UNSEARCHED + text).encode()
            waiting += linked
    return found


def with_glossary(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files, where each page but the glossary ends with a link to it."""

    def ended(place: str, content: bytes) -> bytes:
        if not place.endswith(".md") or place == GLOSSARY:
            return content
        link = posixpath.relpath(GLOSSARY, posixpath.dirname(place) or ".")
        return content.rstrip() + f"\n\n---\n\nNew words are in the [glossary]({link}).\n".encode()

    return {place: ended(place, content) for place, content in files.items()}


def site_path(source: str) -> str:
    """Where a file of the repository is in the site."""
    return re.sub(r"\.ipynb$", ".md", source.removeprefix("docs/site/").removeprefix("docs/"))


def _moved(source: str, text: str) -> tuple[str, list[str]]:
    """A page as the site has it, and the files outside docs/ that it links to."""
    outside = []

    def move(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        if not target.startswith("docs/"):
            outside.append(target)
        return link[1] + posixpath.relpath(site_path(target), posixpath.dirname(site_path(source)) or ".")

    linked = LINK.sub(move, text)
    return ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), linked), outside
