"""The page about dependencies has a word about each of them."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from docs.site.pages import ROOT

PAGE = (ROOT / "docs/dependencies.md").read_text("utf-8").lower()


@pytest.mark.parametrize("path", ["pyproject.toml", "client/pyproject.toml"])
def test_every_dependency_is_on_the_page(path: str) -> None:
    document = tomllib.loads((ROOT / path).read_text("utf-8"))
    project = document["project"]
    asked = [*project["dependencies"], *document["build-system"]["requires"]]
    asked += [each for extra in project.get("optional-dependencies", {}).values() for each in extra]
    names = {Requirement(each).name for each in asked} - {project["name"]}
    assert {name for name in names if not re.search(rf"\b{re.escape(name)}\b", PAGE)} == set()
