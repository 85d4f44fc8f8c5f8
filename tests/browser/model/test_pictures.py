"""Pictures of the inside: sweeps of patches, heads, features, measures of the map, steering; and the code for them."""

import math
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Page, expect
from safetensors.numpy import load

from tests.browser.conftest import OpenPage
from tests.browser.filling import expect_no_violations
from tests.browser.model.conftest import PROMPT, Inside

pytestmark = pytest.mark.browser

CLIPBOARD = ("clipboard-read", "clipboard-write")
CLEAN, CORRUPTED = "The cat sat here", "The dog sat here"


def share(part: float) -> str:
    """As the page writes it."""
    return f"{100 * part:.{0 if part >= 0.1 else 1}f} %"


def copied(page: Page, what: str, form: str = "Python") -> str:
    page.get_by_title(f"Copy as {form}: {what}", exact=True).click()
    expect(page.get_by_role("list", name="Messages")).to_contain_text(f"Copied as {form}: {what}")
    return str(page.evaluate("navigator.clipboard.readText()"))


def test_code_of_actions_does_the_same(http: httpx.Client, open_page: OpenPage, tmp_path: Path) -> None:
    inside = Inside(http, open_page, permissions=CLIPBOARD)
    exec(copied(inside.page, "the question") + "djinn.close()")
    inside.expect_pause(inside.layers - 1)
    inside.page.get_by_label("Operation").select_option("ablate")
    exec(copied(inside.page, "the edit") + "djinn.close()")
    assert not np.any(inside.activation()[-1])
    inside.page.get_by_role("region", name="Where heads look").get_by_role("button", name="Show them").click()
    expect(inside.page.locator(".heads-grid button").first).to_be_visible()
    code = copied(inside.page, "the heads that are shown", "curl")
    subprocess.run(["bash", "-ec", code], cwd=tmp_path, check=True)
    assert load((tmp_path / "patterns.safetensors").read_bytes())


def test_from_nothing_to_the_head_that_brings_the_answer_back(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page("/", refusals=True, permissions=CLIPBOARD)
    page.get_by_role("region", name="To begin with").get_by_role("link", name="Which head moves the name?").click()
    run, answer = page.get_by_role("button", name="Run the sweep"), page.get_by_label("Answer", exact=True)
    for label, text in ("Clean prompt", CLEAN), ("Corrupted prompt", CORRUPTED), ("Less that of", "#60"):
        page.get_by_label(label).fill(text)
    answer.fill("a b c")
    run.click()
    expect(answer).to_have_accessible_description(re.compile("must be 1 token"))
    answer.fill("#21")
    page.route("**/activations", lambda route: route.fulfill(status=429, json={"error": {}}), times=1)
    run.click()
    page.get_by_role("button", name="Try again").click()  # it does not try again by itself
    said = page.get_by_role("region", name="The sweep").get_by_role("status").first
    expect(said).to_contain_text("places in")
    left: dict[str, Any] = {}
    exec(copied(page, "the sweep"), left)
    sweep, djinn = left["sweep"], left["djinn"]
    [(layer, head, part)] = sweep.tables[0].best(1)
    layers = sweep.tables[0].layers
    with djinn.sessions.create() as session:
        session.capture_at(layers=layers, point="z")
        session.capture_at(layer=layers[-1])
        session.generate(prompt=CLEAN, max_tokens=0)
        units = session.attribution((21, 60)).units
    writes = {(each.layer, unit.index): unit.value or 0 for each in units for unit in each.units}
    writing = f"and writes {writes[layer, head]:+.2f} toward #21.".replace("-", "−")
    expect(said).to_contain_text(f"Head {head} of layer {layer} brings back {share(part)}, {writing}")
    read = djinn.activations([CLEAN], points=["pattern"], layers=[layer])
    djinn.close()
    looks = page.get_by_role("status").filter(has_text="looks at")
    expect(looks).to_contain_text(share(float(read.tensors["0.pattern"][0, -1, head].max())))
    grid = page.get_by_role("grid", name="z by layer and head")
    expect(grid.get_by_role("gridcell")).to_have_count(sum(map(len, sweep.tables[0].values)))
    expect_no_violations(page)
    best = max(writes, key=writes.__getitem__)
    page.get_by_role("button", name=f"Head {best[1]} of layer {best[0]} ").click()
    grid.focus()
    page.keyboard.press("Home")
    expect(grid).to_have_attribute("aria-activedescendant", f"place-z-{best[0]}-0")
    page.reload()
    expect(page.get_by_label("Clean prompt")).to_have_value(CLEAN)
    page.get_by_label("Patched alone").select_option("each token")
    run.click()
    page.get_by_role("button", name="Look inside there").click()
    expect(page.get_by_role("status").filter(has_text="paused after layer")).to_be_visible()


def test_heads_are_read_again_or_as_they_were_captured(inside: Inside) -> None:
    panel = inside.page.get_by_role("region", name="Where heads look")
    expect(panel.get_by_role("button", name="Show them")).to_be_disabled()
    for told in ("read again", "as captured"):
        inside.post(f"{inside.path}/rewind", {"to_token": 0})
        inside.post(f"{inside.path}/generate", {"prompt": PROMPT, "max_tokens": 0})
        panel.get_by_role("button", name="Show them").click()
        expect(panel).to_contain_text(told)
        if told == "read again":
            panel.get_by_label("Watch the heads").click()
            expect(panel.get_by_label("Watch the heads")).to_be_checked()
    panel.locator(".heads-grid button").nth(2).click()
    [pattern] = load(inside.call("GET", f"{inside.path}/captures?point=pattern").content).values()
    seen = re.compile(f"^Head 2: position .* at position {int(pattern[-1, 2].argmax())},")
    expect(panel.get_by_role("img", name=seen)).to_have_count(2)
    inside.page.reload()  # the address says which head
    expect(panel.get_by_role("img", name=seen)).to_have_count(2)


def test_what_cells_measure_and_where_the_answer_takes_the_lead(inside: Inside) -> None:
    inside.pause_at(inside.layers - 1)
    position = inside.view["checkpoint"]["end"] - 1
    inside.cell(0, position).click()
    answer = inside.get(f"{inside.path}/lens")["layers"][-1]["token_ids"][0][0]
    lens = inside.get(f"{inside.path}/lens?measures=true&tokens={answer}")["layers"]
    leads = max((each["layer"] + 1 for each in lens if each["token_ids"][0][0] != answer), default=0)
    expect(inside.page.get_by_label("The chosen cell")).to_contain_text(f"leads from layer {leads} on.")
    expect(inside.rung(leads).locator("..")).to_have_class(re.compile("leads"))
    [p], [rank], entropy, kl = (lens[1][name][0] for name in ("chosen_logprobs", "ranks", "entropies", "divergences"))
    shown = {"p": share(math.exp(p)), "rank": str(rank + 1), "entropy": f"{entropy:.1f}", "kl": f"{kl:.2f}"}
    for measure, text in shown.items():
        inside.page.get_by_label("Cells show").select_option(measure)
        expect(inside.cell(1, position)).to_have_text(text)
    inside.page.reload()  # the address says what cells show
    expect(inside.cell(1, position)).to_have_text(shown["kl"])


def test_features_of_a_dictionary_at_the_chosen_token(inside: Inside, tmp_path: Path) -> None:
    draw, size, count = np.random.default_rng(3), inside.get("/version")["hidden_size"], 32
    shapes: dict[str, Any] = {"W_enc": (size, count), "W_dec": (count, size), "b_dec": size}
    shapes |= dict.fromkeys(("b_enc", "threshold"), count)
    np.savez(tmp_path / "params.npz", **{name: draw.normal(size=shape).astype("f4") for name, shape in shapes.items()})
    panel = inside.page.get_by_role("region", name="Features")
    panel.get_by_label("Name").fill("drawn")
    panel.get_by_label("Weights").set_input_files(tmp_path / "params.npz")
    panel.get_by_label("Layer, without").fill("1")
    panel.get_by_role("button", name="Add the dictionary").click()
    panel.get_by_role("button", name="Capture after layer 1").click()
    inside.start(tokens=1)
    expect(panel.get_by_role("status")).to_contain_text("the most active first")
    [at] = inside.get(f"{inside.path}/features?dictionary=drawn")["positions"]
    expect(panel.get_by_role("listitem")).to_contain_text([f"{feature['activation']:.2f}" for feature in at["top"]])
    panel.get_by_role("button", name=f"Switch feature {at['top'][0]['index']} off").click()
    expect(inside.page.get_by_role("list", name="Messages")).to_contain_text("is off after layer 1")
    assert inside.breakpoints("edit")[0]["edits"][0]["op"] == "ablate"
    inside.page.goto("about:blank")  # before the session is closed
    inside.call("DELETE", inside.path)
    inside.call("DELETE", "/v1/dictionaries/drawn")
