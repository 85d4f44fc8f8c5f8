"""The site builds without a warning, links to what it has, and loads nothing from elsewhere."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from docs.site.llms import CONFIG
from docs.site.pages import ROOT, site_path

LOADS = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """The links of a page of HTML, and the names in it that links may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.names.add(value)
            elif name in ("href", "src") and value:
                self.links.append((tag, name, value))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it, in another folder."""
    pytest.importorskip("zensical", reason="make setup-dev installs it")
    folder: Path = tmp_path_factory.mktemp("site")
    config = CONFIG.read_text("utf-8").replace('"build/', '"')
    (folder / "zensical.toml").write_text(config)
    run(ROOT, "-m", "docs.site", str(folder / "docs"))
    told = run(folder, "-m", "zensical", "build", "--strict")
    assert "warning" not in told.lower()
    return folder / "site"


def run(folder: Path, *arguments: str) -> str:
    ended = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """The pages that Zensical has made: reports of the load generator are as they were."""
    found = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    return {path: Page(text) for path, text in found.items() if "zensical" in text}


def navigation() -> Iterator[tuple[str, str]]:
    """Title and address of each page that the navigation names."""
    project: dict[str, Any] = tomllib.loads(CONFIG.read_text("utf-8"))["project"]
    for section in project["nav"]:
        for entry in section.values():
            for page in entry if isinstance(entry, list) else []:
                yield from page.items()


def test_every_page_of_the_docs_is_in_the_navigation() -> None:
    ours = [path for kind in ("*.md", "*.ipynb") for path in (ROOT / "docs").rglob(kind)]
    there = {path for _, path in navigation()} | {"index.md"}
    assert {path.name for path in ours if site_path(path.relative_to(ROOT).as_posix()) not in there} == set()


@pytest.mark.dev
def test_every_link_leads_to_a_page_and_a_heading_and_nothing_is_loaded_from_elsewhere(
    site: Path, pages: dict[Path, Page]
) -> None:
    links = [(path.name, *link) for path, page in pages.items() for link in page.links]
    assert [link for link in links if link[1:3] in LOADS and urlsplit(link[3]).netloc] == []
    assert len(pages) > 30
    broken = set()
    for path, page in pages.items():
        if path.name == "404.html":  # its links are from the root of a server
            continue
        for _, _, link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            lacks_name = parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names
            if not target.exists() or lacks_name:
                broken.add((path.relative_to(site).as_posix(), link))
    assert broken == set()


@pytest.mark.dev
def test_a_notebook_is_a_page_with_the_pictures_that_it_drew(site: Path, pages: dict[Path, Page]) -> None:
    for path in (ROOT / "docs/notebooks").glob("*.ipynb"):
        page = pages[site / f"notebooks/{path.stem}.html"]
        drawn = [link for tag, _, link in page.links if tag == "img" and link.startswith(path.stem)]
        assert len(drawn) == len(re.findall(r'"image/(?:png|svg)', path.read_text("utf-8"))) >= 2
        assert all((site / "notebooks" / link).read_bytes().startswith((b"\x89PNG", b"<svg")) for link in drawn)


@pytest.mark.dev
def test_the_index_for_language_models_has_every_page(site: Path) -> None:
    text = (site / "llms.txt").read_text("utf-8")
    assert re.match(r"# Djinn\n\n> .+\n\n## Tutorials\n", text)
    entries = re.findall(r"^- \[(.+?)\]\((.+?)\): (.+)$", text, re.MULTILINE)
    assert [title for title, _, _ in entries] == [title for title, _ in navigation()]
    assert all((site / address).is_file() and len(sentence) > 15 for _, address, sentence in entries)
