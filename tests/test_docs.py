"""The pages about the HTTP API know every route, error and metric that there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.domain.errors import DjinnError
from tests.serving import serve

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text("utf-8") for path in DOCS.rglob("*.md")}
GUIDES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
ROUTE = re.compile(r"/[\w/{}.]+")
PLACE = re.compile(r"`((?:app|client|loadgen|benchmarks|tests|docs)/[\w./]*)`")
COMMAND_LINE_ONLY = {"model_unavailable"}


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with serve() as url:
        yield url


def codes(error: type[DjinnError]) -> set[str]:
    return {error.code}.union(*map(codes, error.__subclasses__()))


def unnamed(path: str) -> str:
    """The route with no names in its braces: the pages call the same thing by shorter ones."""
    return re.sub(r"\{\w+\}", "{}", path)


def test_every_route_is_documented(base_url: str) -> None:
    paths = httpx.get(f"{base_url}/openapi.json").json()["paths"]
    written = {unnamed(path) for page in ("api", "breakpoints") for path in ROUTE.findall(PAGES[page])}
    assert {path for path in paths if unnamed(path) not in written} == set()


def test_every_error_is_documented() -> None:
    table = PAGES["api"].partition("## Errors")[2].partition("## Headers")[0]
    rows = [row.split("|") for row in table.splitlines() if re.match(r"\| \d{3} ", row)]
    assert {code for row in rows for code in re.findall(r"`(\w+)`", row[3])} == codes(DjinnError) - COMMAND_LINE_ONLY


def test_every_metric_is_documented(base_url: str) -> None:
    text = httpx.get(f"{base_url}/metrics").text
    names = set(re.findall(r"^# TYPE ((?:djinn_|vllm:)\w+)", text, re.MULTILINE))
    found = {re.sub(r"_(total|created)$", "", name) for name in names}
    rows = "".join(re.findall(r"^\| .*$", PAGES["reference/metrics"], re.MULTILINE))
    assert found == set(re.findall(r"(?:djinn_|vllm:)\w+", rows))


def test_every_file_that_the_guides_name_exists() -> None:
    named = {path for guide in GUIDES for path in PLACE.findall(guide.read_text("utf-8"))}
    assert len(named) > 20
    assert {path for path in named if not (ROOT / path).exists()} == set()


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_every_link_leads_somewhere(guide: Path) -> None:
    broken = set()
    for path, anchor in LINK.findall(guide.read_text("utf-8")):
        target = guide.parent / path if path else guide
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.add(f"{path}#{anchor}")
    assert broken == set()
