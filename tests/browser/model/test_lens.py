"""Inside the model: the lens as a heatmap, checked against the API and against Transformers."""

from __future__ import annotations

import math
import re
from typing import Any

import httpx
import pytest
import torch
from playwright.sync_api import expect
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.model_store.export import export_model
from app.settings import Settings
from tests.browser.conftest import OpenPage
from tests.browser.filling import eventually
from tests.browser.model.inside import Inside
from tests.serving import serve

pytestmark = pytest.mark.browser

SMOLLM = "smollm2-135m-instruct"
QUESTION = "The capital of France is the city of"
TEXTS = "(ids) => ids.map((id) => document.getElementById(id)?.textContent)"
CLEAR = 0.1
"""A lead in probability that rounding does not take away."""


def visible(text: str) -> str:
    """As the page shows a token: lib/tokens.js."""
    shown = re.sub(r"\r\n|\r|\n", "↵", text).replace("\t", "⇥")
    shown = re.sub(r"[\x00-\x1f]", lambda found: chr(0x2400 + ord(found[0])), shown).replace("\x7f", "␡")
    return re.sub(r"^ +| +$", lambda found: "·" * len(found[0]), shown) or "∅"


def test_the_last_layer_says_what_the_turn_then_says(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    last = inside.layers - 1
    inside.pause_at(last, tokens=1)
    position = inside.view["checkpoint"]["end"] - 1
    cell = inside.cell(last, position)
    expect(cell).not_to_be_empty()
    shown = cell.text_content()
    inside.button("To the end").click()
    inside.expect_idle()
    said = inside.get(f"{inside.path}/history")["token_ids"][position + 1]
    assert shown == visible(inside.post("/detokenize", {"tokens": [said]})["prompt"])


def test_arrow_keys_move_the_cell_and_tell_of_it(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    inside.pause_at(1)
    inside.page.get_by_role("grid").focus()
    last = inside.view["checkpoint"]["end"] - 1
    told = inside.page.get_by_label("The chosen cell").get_by_role("status")
    expect(told).to_contain_text(f"Layer 1, position {last}, after")
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowRight"):
        inside.page.keyboard.press(key)
    expect(told).to_contain_text(f"Layer 0, position {last - 1}, after")
    inside.page.keyboard.press("Home")
    expect(told).to_contain_text("Layer 0, position 0, after")
    expect(inside.page.get_by_role("grid")).to_have_attribute("aria-activedescendant", "cell-0-0")


def test_a_step_fills_in_the_next_layer_and_clearing_forgets_what_was(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    inside.pause_at(0)
    expect(inside.cell(0, 4)).not_to_be_empty()
    expect(inside.cell(1, 4)).to_be_empty()
    inside.button("Next layer").click()
    expect(inside.cell(1, 4)).not_to_be_empty()
    expect(inside.cell(2, 4)).to_be_empty()
    inside.button("Clear the map").click()
    expect(inside.cell(0, 4)).to_be_empty()
    assert [each["layer"] for each in inside.get(f"{inside.path}/lens?positions=3:4")["layers"]] == [1]


def test_a_long_context_fills_in_as_it_is_scrolled_to(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    asked: list[str] = []
    inside.page.on("request", lambda request: asked.append(request.url))
    inside.arm(1)
    inside.start("The quick brown fox. " * 12)
    end = inside.expect_pause(1)["end"]
    assert end > 200
    expect(inside.cell(1, end - 1)).not_to_be_empty()
    expect(inside.cell(1, 0)).to_have_count(0)
    maps = [url for url in asked if "/lens?" in url]
    assert f"positions={end - 64}%3A{end}" in maps[0]
    inside.page.locator(".inside").evaluate("box => { box.scrollLeft = 0; }")
    expect(inside.cell(1, 0)).not_to_be_empty()


def test_the_server_computes_nothing_for_a_screen_that_is_left(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    inside.pause_at(1)
    expect(inside.cell(1, 3)).not_to_be_empty()
    inside.page.get_by_role("link", name="Sessions", exact=True).click()
    row = inside.page.locator(f'tr[data-id="{inside.id}"]')
    expect(row).to_contain_text("paused")
    asked: list[str] = []
    inside.page.on("request", lambda request: asked.append(request.url))
    inside.post(f"{inside.path}/cancel", {})
    expect(row).not_to_contain_text("paused")
    inside.page.get_by_role("link", name=inside.id[-8:], exact=True).click()
    expect(inside.page.get_by_role("region", name="Facts")).to_be_visible()
    assert not [url for url in asked if "/lens" in url]


def test_two_tabs_show_the_same_map(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    second = open_page(inside.page.url, refusals=True)
    inside.pause_at(2)
    for layer in range(3):
        expect(inside.cell(layer, 7)).not_to_be_empty()
        expect(second.locator(f"#cell-{layer}-7")).to_have_text(str(inside.cell(layer, 7).text_content()))


@pytest.mark.model
def test_a_cell_tells_its_tokens_and_the_map_agrees_with_transformers(open_page: OpenPage) -> None:
    with serve(model=SMOLLM, kv_device=64 << 20) as url, httpx.Client(base_url=url, timeout=60) as http:
        inside = Inside(http, open_page)
        look(inside)
        expect_agreement(inside)
        inside.page.goto("about:blank")


def look(inside: Inside) -> None:
    """At the tokens of a cell after a turn about France, and at the path of one of them."""
    inside.arm(inside.layers - 1)
    inside.start(QUESTION)
    inside.expect_pause(inside.layers - 1)
    last = inside.view["checkpoint"]["end"] - 1
    inside.cell(inside.layers - 1, last).click()
    tops = inside.page.locator(".tops button")
    expect(tops).to_have_count(5)
    lens = inside.get(f"{inside.path}/lens?positions={last}:{last + 1}&top_k=5")
    layer = lens["layers"][-1]
    for at in range(2):
        share = 100 * math.exp(layer["logprobs"][0][at])
        expect(tops.nth(at)).to_contain_text(visible(lens["texts"][str(layer["token_ids"][0][at])]))
        expect(tops.nth(at)).to_contain_text(f"{share:.0f} %" if share >= 10 else f"{share:.1f} %")
    tops.first.click()
    pinned = layer["token_ids"][0][0]
    among = [each for each in lens["layers"] if pinned in each["token_ids"][0]]
    chart = inside.page.get_by_role("img", name=re.compile("Probability of ·Paris by layer"))
    expect(chart.locator("circle")).to_have_count(len(among))
    tops.first.click()
    expect(chart).to_have_count(0)


def expect_agreement(inside: Inside) -> None:
    """The map is that of Transformers, wherever one token is clearly the best."""
    tops, texts = reference()
    wanted = {
        f"cell-{layer}-{position}": visible(texts(token_id))
        for layer, row in enumerate(tops)
        for position, (best, second, token_id) in enumerate(row)
        if best - second > CLEAR
    }
    assert len(wanted) > len(tops)
    assert wanted[f"cell-{len(tops) - 1}-{len(tops[0]) - 1}"] == "·Paris"
    eventually(lambda: inside.page.evaluate(TEXTS, list(wanted)), list(wanted.values()))


def reference() -> tuple[list[list[tuple[float, float, int]]], Any]:
    """After each layer at each position: the two highest probabilities and the best token. Transformers has put the
    last layer's residual stream through the final norm already.
    """
    folder = export_model(SMOLLM, Settings().cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        output = model(tokenizer(QUESTION, return_tensors="pt")["input_ids"], output_hidden_states=True)
        logits = [model.lm_head(model.model.norm(hidden)) for hidden in output.hidden_states[1:-1]] + [output.logits]
    rows = []
    for each in logits:
        best = each[0].softmax(-1).topk(2)
        rows.append([(p[0], p[1], ids[0]) for p, ids in zip(best.values.tolist(), best.indices.tolist(), strict=True)])
    return rows, lambda token_id: str(tokenizer.decode([token_id]))
