"""The tokens of a session: what is told of each, and how the session is rewound to one."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.session.on_session import OnSession, panel

pytestmark = pytest.mark.browser

MOST_DRAWN = 2000


def tokens(page: Page, kind: str = "") -> list[str]:
    """The texts of the drawn tokens of a kind, in their order."""
    return page.locator(f".token{kind}").all_text_contents()


def test_each_token_is_drawn_where_it_begins_and_ends(on: OnSession) -> None:
    on.post("generate", prompt="Hi\nyou", max_tokens=0)
    page = on.open()
    expect(page.locator(".token")).to_have_count(7)
    assert tokens(page) == ["<bos>", "H", "i", "↵\n", "y", "o", "u"]
    assert tokens(page, ".special") == ["<bos>"]
    page.get_by_label("Show tokens").check()
    expect(page.locator(".boundaries .token")).to_have_count(7)
    page.locator(".token").nth(2).hover()
    expect(panel(page, "Conversation")).to_contain_text('Position 2 · id 105 · text "i"')


def test_the_keyboard_walks_and_rewinds(on: OnSession) -> None:
    on.post("generate", prompt="Hello", max_tokens=0)
    before = on.history()["token_ids"]
    page = on.open()
    conversation = panel(page, "Conversation")
    group = conversation.get_by_role("group")
    group.press("ArrowLeft")
    expect(conversation).to_contain_text("Position 5")
    group.press("Home")
    group.press("ArrowRight")
    group.press("ArrowRight")
    expect(conversation).to_contain_text("Position 2")
    group.press("Enter")
    expect(page.get_by_role("button", name="Rewind to here")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("Rewind to position 2?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert on.history()["token_ids"] == before
    expect(page.get_by_role("button", name="Rewind to here")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Drop 4 tokens").press("Enter")
    on.wait_until(tokens=2)
    expect(page.locator(".token")).to_have_count(2)
    assert on.history()["token_ids"] == before[:2]


def test_what_another_client_does_is_seen(on: OnSession) -> None:
    page = on.open()
    expect(page.get_by_text("Nothing yet")).to_be_visible()
    on.generate(tokens=5)
    expect(page.locator(".token")).to_have_count(11)
    expect(page.locator(".token.generated")).to_have_count(5)
    on.post("rewind", to_token=0)
    expect(page.locator(".token")).to_have_count(0)
    on.generate("Hello", tokens=45)
    expect(page.locator(".token.generated")).to_have_count(45)
    usage = on.generate(" and", tokens=2)["usage"]
    assert usage["cached_tokens"] > 0
    expect(page.locator(".token.cached")).to_have_count(usage["cached_tokens"])
    expect(panel(page, "Conversation").get_by_role("list")).to_contain_text("cached in the last turn")
    on.post("rewind", to_token=3)
    expect(page.locator(".token")).to_have_count(3)


def test_a_long_history_is_drawn_in_part(on_roomy: OnSession) -> None:
    length = 7000
    on_roomy.post("generate", token_ids=[100 + n % 20 for n in range(length)], max_tokens=0)
    page = on_roomy.open()
    drawn = page.locator(".token")
    expect(drawn.last).to_have_attribute("data-position", str(length - 1))
    assert drawn.count() <= MOST_DRAWN
    page.get_by_role("button", name="Earlier tokens").click()
    expect(page.locator(".token[data-position='4500']")).to_have_count(1)
    page.get_by_role("button", name="From the first").click()
    expect(drawn.first).to_have_attribute("data-position", "0")
    page.get_by_role("button", name="Later tokens").click()
    expect(page.locator(".token[data-position='2500']")).to_have_count(1)
    page.get_by_role("button", name="To the last").click()
    expect(drawn.last).to_have_attribute("data-position", str(length - 1))
    panel(page, "Conversation").get_by_role("group").press("Home")
    expect(page.locator(".token.chosen")).to_have_attribute("data-position", "0")
    assert drawn.count() <= MOST_DRAWN
