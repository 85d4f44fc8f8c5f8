"""The pages of the reference are those of the server, the client and what they depend on, as they are."""

from __future__ import annotations

import re
import tomllib

import httpx
import pytest
from packaging.requirements import Requirement

import client
from app.settings import Settings
from docs.site.client_page import client_page
from docs.site.flags_page import flags_page
from docs.site.pages import ROOT
from docs.site.routes_page import document, routes_page


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
    assert "io_wait(*, resume_in_ms: float | None = None) -> Iterator[PhaseChange]" in page
    assert "| `cached_tokens` | `int` |" in page


PAGE = (ROOT / "docs/dependencies.md").read_text("utf-8").lower()


@pytest.mark.parametrize("path", ["pyproject.toml", "client/pyproject.toml"])
def test_every_dependency_is_on_the_page(path: str) -> None:
    document = tomllib.loads((ROOT / path).read_text("utf-8"))
    project = document["project"]
    asked = [*project["dependencies"], *document["build-system"]["requires"]]
    asked += [each for extra in project.get("optional-dependencies", {}).values() for each in extra]
    names = {Requirement(each).name for each in asked} - {project["name"]}
    assert {name for name in names if not re.search(rf"\b{re.escape(name)}\b", PAGE)} == set()
