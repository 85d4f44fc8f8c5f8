"""A reader who follows a tutorial to its end sees what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.site.pages import ROOT
from tests.docs.following import BLOCK, LAYERS, NOT_RUN, follow
from tests.openai.reference import save_tiny_model

TIMEOUT_S = 600
PROMISED = {
    "tutorials/agents-that-wait.md": ['"tier":"device"', "tokens were in the KV cache", "tokens cached", "djinn+none"],
    "tutorials/stop-between-two-layers.md": ['"status":"paused"', "after layer 27", "paused still, and then finished"],
    "tutorials/steer-a-session.md": ["name='cheerful'", "steered:", "an awful morning"],
    "tutorials/larger-than-memory.md": ["'ring_bytes': 0,", "the same tokens", "\n0 tokens computed again"],
    "tutorials/compare-with-vllm.md": ["llamacpp", "turns completed", "agents"],
    "sessions.md": ['"cached_tokens"', '"has_more"'],
}
"""What the output of each page has."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose layers have the numbers of SmolLM2-135M's."""
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder, max_model_len=2048, layers=LAYERS)
    return folder


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("page", PROMISED)
def test_every_command_of_a_page_works_in_its_order(page: str, model: Path, tmp_path: Path) -> None:
    printed = follow(ROOT / "docs" / page, tmp_path, model, TIMEOUT_S)
    assert [promise for promise in PROMISED[page] if promise not in printed] == [], printed


def test_every_tutorial_is_followed() -> None:
    assert {path.name for path in (ROOT / "docs/tutorials").glob("*.md")} <= {Path(page).name for page in PROMISED}


def test_a_page_says_which_command_no_test_runs() -> None:
    for page in PROMISED:
        text = (ROOT / "docs" / page).read_text("utf-8")
        if any(NOT_RUN in block for _, block in BLOCK.findall(text)):
            assert "No test runs this line" in text
