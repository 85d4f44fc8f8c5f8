"""Inside the model: what is typed stays, and is sent once."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenPage
from tests.browser.model.inside import PROMPT, Inside

pytestmark = pytest.mark.browser


def test_a_double_click_starts_one_turn(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    asked: list[str] = []
    inside.page.on("request", lambda request: asked.append(request.url))
    inside.arm(1)
    inside.page.get_by_label("Text", exact=True).fill(PROMPT)
    inside.button("Start the turn").dblclick()
    inside.expect_pause(1)
    assert len([url for url in asked if url.endswith("/generate")]) == 1


def test_a_draft_outlives_a_pause_and_other_screens(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    inside.arm(1)
    inside.page.get_by_label("How often to pause").select_option("each time")
    text, seed = inside.page.get_by_label("Text", exact=True), inside.page.get_by_label("Seed")
    text.fill("Half a thought")
    seed.fill("7")
    two = inside.page.get_by_role("region", name="A vector from two prompts")
    two.get_by_label("Minus prompt").fill("hate")
    inside.post(f"{inside.path}/generate", {"prompt": PROMPT, "max_tokens": 4})
    inside.expect_pause(1)
    inside.button("Cancel the turn").click()
    inside.expect_idle()
    expect(text).to_have_value("Half a thought")
    inside.page.get_by_role("link", name=inside.id[-8:], exact=True).click()
    expect(inside.page.get_by_role("region", name="Facts")).to_be_visible()
    expect(text).to_have_value("Half a thought")
    expect(seed).to_have_value("7")
    inside.page.go_back()
    expect(two.get_by_label("Minus prompt")).to_have_value("hate")
    expect(inside.page.get_by_label("How often to pause")).to_have_value("each")
    expect(text).to_have_value("Half a thought")
