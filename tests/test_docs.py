"""The pages know every route, error, metric, setting and dependency that there is, and lead to what there is."""

import re
import tomllib
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from transformers import AutoConfig

import client
from app.domain.errors import DjinnError
from app.gpu.models.layers import divided
from app.gpu.models.variants import VARIANTS, has_turned_matrices
from app.model_store.gguf_families import FAMILIES as GGUF_FAMILIES
from app.settings import Settings
from docs.site.client_page import client_page
from docs.site.flags_page import flags_page
from docs.site.pages import ROOT
from docs.site.routes_page import document, routes_page

DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text("utf-8") for path in DOCS.rglob("*.md")}
GUIDES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
ROUTE = re.compile(r"/[\w/{}.]+")
PLACE = re.compile(r"`((?:app|client|loadgen|benchmarks|tests|docs)/[\w./]*)`")
COMMAND_LINE_ONLY = {"model_unavailable"}


def codes(error: type[DjinnError]) -> set[str]:
    return {error.code}.union(*map(codes, error.__subclasses__()))


ROUTED = "api", "breakpoints", "dictionaries", "experiments"
"""The pages with tables of routes."""


def unnamed(path: str) -> str:
    """The route with no names in its braces: the pages call the same thing by shorter ones."""
    return re.sub(r"\{\w+\}", "{}", path)


def test_every_route_is_documented(server_url: str) -> None:
    paths = httpx.get(f"{server_url}/openapi.json").json()["paths"]
    written = {unnamed(path) for page in ROUTED for path in ROUTE.findall(PAGES[page])}
    assert {path for path in paths if unnamed(path) not in written} == set()


def test_every_error_is_documented() -> None:
    table = PAGES["api"].partition("## Errors")[2].partition("## Headers")[0]
    rows = [row.split("|") for row in table.splitlines() if re.match(r"\| \d{3} ", row)]
    assert {code for row in rows for code in re.findall(r"`(\w+)`", row[3])} == codes(DjinnError) - COMMAND_LINE_ONLY


def test_every_metric_is_documented(server_url: str) -> None:
    text = httpx.get(f"{server_url}/metrics").text
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


def test_the_routes_are_those_of_a_running_server(http: httpx.Client) -> None:
    served = http.get("/openapi.json").json()
    page = routes_page(document())
    assert page == routes_page(served)
    for path, operations in served["paths"].items():
        for method, operation in operations.items():
            [section] = re.findall(rf"^### `{method.upper()} {re.escape(path)}`$(.*?)(?=^##|\Z)", page, re.M | re.S)
            assert operation.get("description", "") in section
            assert all(f"`{parameter['name']}`" in section for parameter in operation.get("parameters", []))
            assert all(status in section for status in operation["responses"])


def test_every_setting_has_its_flag_and_its_meaning() -> None:
    page = flags_page()
    for name, field in Settings.model_fields.items():
        [row] = re.findall(rf"^\| .*`--{name.replace('_', '-')}`.*$", page, re.MULTILINE)
        assert (field.description or "").partition(";")[0] in row
    assert "## OpenAI's and Anthropic's routes" in page


def test_every_public_class_of_the_client_is_there_with_its_calls() -> None:
    page = client_page()
    names = {name for name in client.__all__ if not name.startswith("Async")}
    assert names <= set(re.findall(r"^### `(\w+)`$", page, re.MULTILINE))
    assert "#### `io_wait` { #Session.io_wait }" in page
    assert "    resume_in_ms: float | None = None,\n    timeout: Seconds = UNSET,\n) -> Iterator[PhaseChange]" in page
    assert "| `cached_tokens` | `int` |" in page


@pytest.mark.parametrize("path", ["pyproject.toml", "client/pyproject.toml"])
def test_every_dependency_is_on_the_page(path: str) -> None:
    settings = tomllib.loads((ROOT / path).read_text("utf-8"))
    project, page = settings["project"], PAGES["dependencies"].lower()
    asked = [*project["dependencies"], *settings["build-system"]["requires"]]
    asked += [each for extra in project.get("optional-dependencies", {}).values() for each in extra]
    names = {Requirement(each).name for each in asked} - {project["name"]}
    assert {name for name in names if not re.search(rf"\b{re.escape(name)}\b", page)} == set()


def test_the_table_of_models_is_that_of_the_registry() -> None:
    """One row for each family of Djinn's own layers, and one for all others."""
    in_place = {model_type for family in GGUF_FAMILIES.values() for model_type in family.model_types}
    rows: list[tuple[str, ...]] = [
        ("family", "layers", "CPU, GPU", "ring", "TP", "quantized", "GGUF", "tools, reasoning")
    ]
    rows.append(("---",) * len(rows[0]))
    assert in_place <= VARIANTS.keys()
    for kind in sorted(VARIANTS):
        config = AutoConfig.for_model(kind)
        cut = "yes" if divided(config) else "no"
        kept = "dequantized" if has_turned_matrices(config) else "kept"
        gguf = "in place" if kind in in_place else "converted"
        rows.append((f"`{kind}`", "Djinn's", "yes", "yes", cut, kept, gguf, "by template"))
    rows.append(("any other decoder", "Transformers'", "yes", "no", "no", "dequantized", "converted", "by template"))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    assert table in PAGES["models"], f"docs/models.md must have this table:\n{table}"
