"""A session of a server and the page that shows its inside: what the page does is checked through the API."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import OpenPage

JSON = {"accept": "application/json"}
PROMPT = "Paris is"
"""Few enough tokens for all of them to be in sight."""


class Inside:
    """A new session, and the page that shows its inside."""

    def __init__(self, api: httpx.Client, open_page: Callable[..., Page], **options: Any) -> None:
        self.api = api
        self.id: str = self.post("/v1/sessions", {})["id"]
        self.layers: int = self.get("/version")["num_layers"]
        self.page = open_page(self.address(self.id), **options)

    def address(self, session: str) -> str:
        """Where the page shows the inside of a session."""
        return str(self.api.base_url.join(f"/#/sessions/{session}/model"))

    def call(self, method: str, path: str, **sent: Any) -> httpx.Response:
        """One call of the API, without the page."""
        return self.api.request(method, path, **sent).raise_for_status()

    def get(self, path: str) -> Any:
        return self.call("GET", path).json()

    def post(self, path: str, body: object) -> Any:
        return self.call("POST", path, json=body).json()

    @property
    def path(self) -> str:
        return f"/v1/sessions/{self.id}"

    @property
    def view(self) -> Any:
        return self.get(self.path)

    def breakpoints(self, action: str) -> list[Any]:
        return [each for each in self.get(f"{self.path}/breakpoints")["data"] if each["action"] == action]

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def rung(self, layer: int) -> Locator:
        return self.page.get_by_label("Layers: choose one to pause after it").get_by_role("button").nth(layer)

    def cell(self, layer: int, position: int) -> Locator:
        return self.page.locator(f"#cell-{layer}-{position}")

    def arm(self, layer: int) -> None:
        """By the page; waits until the page shows it."""
        self.rung(layer).click()
        expect(self.rung(layer)).to_have_attribute("aria-pressed", "true")

    def start(self, prompt: str = PROMPT, *, tokens: int = 4, temperature: str = "0") -> None:
        """By the page, greedily."""
        self.page.get_by_label("Text", exact=True).fill(prompt)
        self.page.get_by_label("Most tokens").fill(str(tokens))
        self.page.get_by_label("Temperature").fill(temperature)
        self.button("Start the turn").click()

    def pause_at(self, layer: int, *, tokens: int = 4) -> None:
        """A turn that has come to its first pause."""
        self.arm(layer)
        self.start(tokens=tokens)
        self.expect_pause(layer)

    def expect_pause(self, layer: int) -> Any:
        """The page and the API agree on where the turn stands: the checkpoint."""
        expect(self.page.get_by_role("status").filter(has_text=f"paused after layer {layer} of")).to_be_visible()
        checkpoint = self.view["checkpoint"]
        assert checkpoint["layer"] == layer
        return checkpoint

    def expect_idle(self) -> Any:
        """The page says that no turn runs: the session."""
        expect(self.page.locator(".state.idle")).to_be_visible()
        assert self.view["state"] == "idle"
        return self.view

    def activation(self) -> list[list[float]]:
        found = self.call("GET", f"{self.path}/checkpoint/activation", headers=JSON).json()
        return [list(map(float, row)) for row in found["values"]]


@pytest.fixture
def inside(http: httpx.Client, open_page: OpenPage) -> Inside:
    return Inside(http, open_page)
