"""The commands and the Python of the pages, and which test runs each of them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.site.pages import ROOT

BLOCK = re.compile(
    r"^(?:<!-- (not run: |run by )([^>]+?) -->\n\n)?```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
WHOLE_PAGE = re.compile(r"^<!-- not run, no block of this page: ([^>]+?) -->$", re.MULTILINE)
FOLLOWED = {
    "README.md": ["after layer 27"],
    "docs/breakpoints.md": ['"status":"paused"', '"logprob"', '"cheerful"', '"status":"finished"'],
    "docs/doctor.md": ["host_memory", '"schema_version": 1'],
    "docs/install.md": ["djinn ", "torch "],
    "docs/models.md": [],
    "docs/openai.md": ["response.output_item.done", '"phase":"io_wait"'],
    "docs/operating.md": [" session"],
    "docs/sessions.md": ['"cached_tokens"', '"has_more"'],
    "docs/tutorials/agents-that-wait.md": ['"tier":"device"', "tokens were in the KV cache", "djinn+none"],
    "docs/tutorials/compare-with-vllm.md": ["llamacpp", "turns completed", "agents"],
    "docs/tutorials/larger-than-memory.md": ["'ring_bytes': 0,", "the same tokens", "\n0 tokens recomputed"],
    "docs/tutorials/steer-a-session.md": ["name='cheerful'", "steered:", "an awful morning"],
    "docs/tutorials/stop-between-two-layers.md": ['"status":"paused"', "paused still, and then finished"],
    "docs/weight-ring.md": ['"ring_bytes"'],
}
"""Pages that a test follows from the first command to the last, and what their output has."""
PYTHON_GUIDES = ("README.md", "client/README.md", "docs/anthropic.md", "docs/client.md", "docs/openai.md")
"""Pages whose Python runs block by block."""
SHELL_GUIDE = "docs/shell.md"
"""The page whose commands run block by block."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page. `reason` is why no test runs it, `test` the file of the one that does if the page says so."""

    page: str
    language: str
    text: str
    reason: str | None
    test: str | None

    @property
    def is_free(self) -> bool:
        """Whether the page leaves it to those who run the page."""
        return self.reason is None and self.test is None


def pages() -> list[str]:
    """Every page that has commands for a reader, from the checkout's root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "client/README.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text("utf-8")
    whole = WHOLE_PAGE.search(text)
    for found in BLOCK.finditer(text):
        kind, words, language, code = found.groups()
        reason = words if kind == "not run: " else whole[1] if whole and kind is None else None
        yield Block(page, language, code, reason, words if kind == "run by " else None)


def is_run(block: Block) -> bool:
    if block.test is not None:
        return (ROOT / Path(block.test)).is_file()
    if block.reason is not None:
        return False
    by_language = {"python": PYTHON_GUIDES, "bash": (SHELL_GUIDE,)}
    return block.page in FOLLOWED or block.page in by_language[block.language]
