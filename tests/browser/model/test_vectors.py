"""Inside the model: vectors, from two prompts and from files."""

import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from playwright.sync_api import expect
from safetensors.numpy import load, save

from djinn import Djinn
from tests.browser.conftest import OpenPage
from tests.browser.filling import drop, eventually
from tests.browser.model.conftest import Inside

pytestmark = pytest.mark.browser

FILE = {"content-type": "application/octet-stream"}
FIRST, SECOND = "I love this wonderful day", "I hate this terrible day"


def captured(inside: Inside, prompt: str, layer: int) -> np.ndarray:
    """What the server captures after the layer, `[positions, hidden_size]`, without the page."""
    session = inside.post("/v1/sessions", {})["id"]
    inside.post(f"/v1/sessions/{session}/breakpoints", {"layer": layer, "action": "capture"})
    inside.post(f"/v1/sessions/{session}/generate", {"prompt": prompt, "max_tokens": 0})
    tensors = load(inside.call("GET", f"/v1/sessions/{session}/captures").content)
    return np.concatenate([tensors[name] for name in sorted(tensors)])


@pytest.mark.parametrize("over", ["last", "mean"])
def test_two_prompts_make_a_vector(inside: Inside, over: str) -> None:
    sessions = {each["id"] for each in inside.get("/v1/sessions?limit=100")["data"]}
    form = inside.page.get_by_role("region", name="Steering")
    form.get_by_label("More of").fill(FIRST)
    form.get_by_label("Less of").fill(SECOND)
    form.get_by_label("After layer").fill("1")
    form.get_by_label("Taken over").select_option(over)
    form.get_by_role("button", name="Run both").click()
    expect(form.get_by_role("status")).to_have_text(re.compile(r"The norm of the direction is \d"))
    eventually(lambda: {each["id"] for each in inside.get("/v1/sessions?limit=100")["data"]}, sessions)
    form.get_by_label("Keep as").fill(f"cheerful-{over}")
    form.get_by_role("button", name="Keep the vector").click()
    row = inside.page.get_by_role("row", name=f"cheerful-{over}")
    expect(row).to_be_visible()
    kept = load(inside.call("GET", f"/v1/vectors/cheerful-{over}").content)["vector"]
    love, hate = (captured(inside, prompt, 1) for prompt in (FIRST, SECOND))
    wanted = love[-1] - hate[-1] if over == "last" else love.mean(axis=0) - hate.mean(axis=0)
    np.testing.assert_allclose(kept, wanted, atol=1e-5)
    expect(form).not_to_contain_text("The norm of the direction is")
    for strength, title in (("0", "As it is"), ("-4", "Steered by -4")):
        form.get_by_label("Strength").fill(strength)  # which runs the steered one again, with the vector that is kept
        with Djinn(str(inside.api.base_url)) as djinn, djinn.sessions.create() as session:
            session.steer(layer=1, add=kept, factor=float(strength), keep_norm=True)
            turn = session.generate(prompt="The meeting today was about", max_tokens=40, temperature=0)
        expect(form.get_by_role("article", name=title)).to_contain_text(turn.text.strip())
    row.get_by_role("button", name=f"Delete cheerful-{over}").click()
    expect(row).to_have_count(0)
    assert f"cheerful-{over}" not in str(inside.get("/v1/vectors"))


def test_what_is_missing_for_a_vector_is_told_beside_its_field(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page, refusals=True)
    form = inside.page.get_by_role("region", name="Steering")
    compute, layer = form.get_by_role("button", name="Run both"), form.get_by_label("After layer")
    for field, text in ((form.get_by_label("More of"), FIRST), (form.get_by_label("Less of"), SECOND)):
        field.fill("")
        compute.click()
        expect(field).to_have_accessible_description("enter a prompt")
        field.fill(text)
        expect(field).to_have_accessible_description("")
    for text, told in (("", "enter a layer"), ("99", "99")):
        layer.fill(text)
        compute.click()
        expect(layer).to_have_accessible_description(re.compile(told))
    layer.fill("1")
    panel = inside.page.get_by_role("region", name="Vectors")
    panel.get_by_label("Name").fill("of-a-file")
    panel.get_by_role("button", name="Add the file").click()
    expect(panel.get_by_label("Safetensors file")).to_have_accessible_description("choose a file")
    expect(inside.page.locator(":invalid")).to_have_count(0)  # of which the browser would tell in its own way


def test_a_file_becomes_a_vector_that_edits_take(http: httpx.Client, open_page: OpenPage, tmp_path: Path) -> None:
    inside = Inside(http, open_page, refusals=True)
    size = inside.get("/version")["hidden_size"]
    vector = np.linspace(-1, 1, size, dtype=np.float32)
    path, flat = tmp_path / "mine.safetensors", tmp_path / "flat.safetensors"
    path.write_bytes(save({"mine": vector}))
    flat.write_bytes(save({"flat": vector[None]}))
    panel = inside.page.get_by_role("region", name="Vectors")
    assert drop(inside.page, b"x", "letter.txt"), "it would take the place of the page"
    panel.get_by_label("Name").fill("from-file")
    panel.get_by_label("Safetensors file").set_input_files(flat)
    panel.get_by_role("button", name="Add the file").click()
    expect(panel.get_by_label("Safetensors file")).to_have_accessible_description(
        re.compile(re.escape(f"not [1, {size}]"))
    )
    expect(panel.get_by_label("Name")).to_have_value("from-file")
    panel.get_by_label("Safetensors file").set_input_files(path)
    panel.get_by_role("button", name="Add the file").click()
    expect(panel.get_by_role("row", name="from-file")).to_contain_text(f"{np.linalg.norm(vector):.2f}")
    told = inside.page.get_by_role("list", name="Messages")
    expect(told).to_contain_text("The vector from-file is kept.")
    panel.get_by_label("Name").fill("from-file")
    panel.get_by_label("Safetensors file").set_input_files(path)
    expect(panel.get_by_role("status")).to_have_count(1)
    kept: list[str] = []
    inside.page.on("request", lambda request: kept.append(request.url) if request.method == "POST" else None)
    panel.get_by_role("button", name="Add the file").dblclick()  # which keeps it once
    expect(told).to_contain_text("The vector from-file replaces the one of that name.")
    assert len([url for url in kept if "/v1/vectors" in url]) == 1
    inside.pause_at(1)
    before = np.array(inside.activation())
    inside.page.get_by_label("Operation").select_option("add")
    expect(inside.button("Try it")).to_be_disabled()
    inside.page.get_by_label("Vector", exact=True).select_option("from-file")
    inside.page.get_by_label("Factor", exact=True).fill("2")
    inside.button("Try it").click()
    expect(inside.page.get_by_role("table", name=re.compile("After"))).to_be_visible()
    after = np.array(inside.activation())
    np.testing.assert_allclose(after[-1], before[-1] + 2 * vector, atol=1e-5)
    np.testing.assert_array_equal(after[:-1], before[:-1])


def test_a_vector_that_is_gone_is_offered_no_more(inside: Inside) -> None:
    vector = save({"v": np.ones(inside.get("/version")["hidden_size"], dtype=np.float32)})
    for name in ("first", "second"):
        inside.call("POST", f"/v1/vectors?name={name}", content=vector, headers=FILE)
    inside.page.reload()
    inside.pause_at(1)
    inside.page.get_by_label("Operation").select_option("add")
    offered = inside.page.get_by_label("Vector", exact=True)
    offered.select_option("first")
    inside.button("Delete first").click()
    expect(offered).to_have_value("")
    expect(inside.button("Try it")).to_be_disabled()
    offered.select_option("second")
    inside.call("DELETE", "/v1/vectors/second")  # by another tab, from which one comes back
    inside.page.evaluate("dispatchEvent(new Event('focus'))")
    expect(offered.get_by_role("option", name="second")).to_have_count(0)
    expect(inside.button("Try it")).to_be_disabled()


def test_norms_and_cosines_are_those_of_the_captures(inside: Inside) -> None:
    vector = np.ones(inside.get("/version")["hidden_size"], dtype=np.float32)
    inside.call("POST", "/v1/vectors?name=ones", content=save({"ones": vector}), headers=FILE)
    inside.page.reload()
    inside.pause_at(inside.layers - 1)
    captures = load(inside.call("GET", f"{inside.path}/captures").content)
    last = [captures[name][-1] for name in sorted(captures)]
    panel = inside.page.get_by_role("region", name="Norm and cosine by layer")
    norms = [float(np.linalg.norm(row)) for row in last]
    highest = int(np.argmax(norms))
    expect(panel.get_by_role("img", name=re.compile(rf"Norm by layer\. .* after layer {highest}"))).to_be_visible()
    panel.get_by_label("Cosine to").select_option("ones")
    cosines = [float(row @ vector / np.linalg.norm(row) / np.linalg.norm(vector)) for row in last]
    chart = panel.get_by_role("img", name=re.compile("Cosine by layer. Highest"))
    expect(chart).to_be_visible()
    told = re.search(r"Highest: (\S+) after layer (\d+)", str(chart.get_attribute("aria-label")))
    assert told
    assert float(told[1]) == pytest.approx(max(cosines), abs=1e-3)
    assert int(told[2]) == int(np.argmax(cosines))
    inside.button("Delete ones").click()
    expect(panel.get_by_label("Cosine to")).to_have_value("")
    expect(panel).to_contain_text("Choose a vector.")
    expect(panel.get_by_role("alert")).to_have_count(0)
