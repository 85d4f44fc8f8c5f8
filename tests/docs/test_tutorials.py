"""A reader who follows a tutorial to its end sees what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.site.pages import ROOT
from tests.docs.blocks import FOLLOWED, blocks_of
from tests.docs.following import LAYERS, NOT_RUN, follow
from tests.openai.reference import save_tiny_model

TIMEOUT_S = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose layers have the numbers of SmolLM2-135M's."""
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder, max_model_len=2048, layers=LAYERS)
    return folder


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("page", FOLLOWED)
def test_every_command_of_a_page_works_in_its_order(page: str, model: Path, tmp_path: Path) -> None:
    printed = follow(page, tmp_path, model, TIMEOUT_S)
    assert [promise for promise in FOLLOWED[page] if promise not in printed] == [], printed


def test_every_tutorial_is_followed() -> None:
    assert {path.name for path in (ROOT / "docs/tutorials").glob("*.md")} <= {Path(page).name for page in FOLLOWED}


def test_a_page_says_which_command_no_test_runs() -> None:
    for page in FOLLOWED:
        if any(NOT_RUN in block.text for block in blocks_of(page) if block.is_free):
            assert "No test runs this line" in (ROOT / page).read_text("utf-8")
