"""`llms.txt`: the pages of the site for language models, in the form of https://llmstxt.org."""

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from docs.site.pages import ROOT

CONFIG = ROOT / "zensical.toml"


def llms_text(files: Mapping[str, bytes]) -> str:
    """The index of the navigation's pages: their titles, addresses and first sentences.

    Raises `KeyError` if `files` lacks a page of the navigation.
    """
    project: dict[str, Any] = tomllib.loads(CONFIG.read_text("utf-8"))["project"]
    lines = [f"# {project['site_name']}", "", f"> {project['site_description']}"]
    for entry in project["nav"]:
        [(section, pages)] = entry.items()
        if isinstance(pages, str):
            continue
        lines += ["", f"## {section}", ""]
        for page in pages:
            [(title, path)] = page.items()
            lines.append(f"- [{title}]({address(path)}): {first_sentence(files[path].decode())}")
    return "\n".join(lines) + "\n"


def address(page: str) -> str:
    """Where the site has a page, from its root."""
    return re.sub(r"(README|index)\.md$", "index.html", page).replace(".md", ".html")


def first_sentence(page: str) -> str:
    """The first sentence of a page's first paragraph, without the markup of its links."""
    paragraph = next(part for part in page.split("\n\n") if not part.startswith(("#", "|", "```", "!", "-", "<")))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.?:])\s", plain, maxsplit=1)[0].replace(":", ".")
