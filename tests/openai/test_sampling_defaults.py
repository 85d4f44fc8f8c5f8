"""What a checkpoint recommends is how its turns are sampled, wherever a client leaves it out."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.domain.values import NEUTRAL, SamplingDefaults
from app.main import sampling_defaults
from app.model_store.install import BrokenModel
from app.model_store.pull import CATALOG
from app.model_store.resolve import ResolvedModel, resolve
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference
from tests.serving import serve

CHAT = [{"role": "user", "content": "Hello"}]
COUNT = 12
SAID = {"temperature": 0.75, "top_k": 1, "do_sample": False}
"""Only the likeliest token is left to draw, so turns are greedy without a word of that."""


def says(reference: Reference, folder: Path, **said: Any) -> Path:
    """The shared model, with this in its `generation_config.json`."""
    copied = Path(shutil.copytree(reference.folder, folder / MODEL))
    file = copied / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **said}))
    return copied


@pytest.fixture(scope="module")
def folder(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return says(reference, tmp_path_factory.mktemp("said"), **SAID)


@pytest.fixture(scope="module")
def auto(folder: Path) -> Iterator[httpx.Client]:
    with serve(model=str(folder)) as url, httpx.Client(base_url=url, timeout=30) as http:
        yield http


@pytest.fixture(scope="module")
def none(folder: Path) -> Iterator[httpx.Client]:
    with serve(model=str(folder), generation_config="none") as url, httpx.Client(base_url=url, timeout=30) as http:
        yield http


def answers(http: httpx.Client, chat: list[int], **given: Any) -> list[str]:
    """What each route answers to the same chat."""

    def call(path: str, **body: Any) -> Any:
        return http.post(path, json={**body, **given}).raise_for_status().json()

    session = http.post("/v1/sessions").json()["id"]
    asked = {"model": MODEL, "max_tokens": COUNT}
    return [
        call(f"/v1/sessions/{session}/generate", messages=CHAT, max_tokens=COUNT)["text"],
        call("/v1/completions", prompt=chat, **asked)["choices"][0]["text"],
        call("/v1/chat/completions", messages=CHAT, **asked)["choices"][0]["message"]["content"],
        call("/v1/responses", model=MODEL, input="Hello", max_output_tokens=COUNT)["output"][0]["content"][0]["text"],
        call("/v1/messages", messages=CHAT, **asked)["content"][0]["text"],
    ]


def test_every_route_samples_as_the_checkpoint_says(auto: httpx.Client, reference: Reference) -> None:
    chat = reference.chat(CHAT)
    greedy = reference.decode(reference.greedy(chat, COUNT))
    assert answers(auto, chat) == [greedy] * 5
    typed = [sys.executable, "-m", "app", "chat", "--url", str(auto.base_url), "--max-tokens", str(COUNT)]
    said = subprocess.run(typed, input="Hello\n", capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert (said.returncode, said.stdout) == (0, f"{greedy}\n")


def test_what_a_client_says_wins(auto: httpx.Client, reference: Reference) -> None:
    chat = reference.chat(CHAT)
    greedy = reference.decode(reference.greedy(chat, COUNT))
    assert greedy not in answers(auto, chat, top_k=0)
    nulls = {"model": MODEL, "messages": CHAT, "max_tokens": COUNT, "top_k": None}
    answer = auto.post("/v1/chat/completions", json=nulls).json()
    assert answer["choices"][0]["message"]["content"] == greedy


def test_none_makes_the_defaults_neutral(none: httpx.Client, reference: Reference) -> None:
    chat = reference.chat(CHAT)
    greedy = reference.decode(reference.greedy(chat, COUNT))
    assert greedy not in answers(none, chat)
    assert answers(none, chat, top_k=1) == [greedy] * 5


def test_the_model_and_its_responses_tell_what_they_are_sampled_with(auto: httpx.Client, none: httpx.Client) -> None:
    told = [http.get(f"/v1/models/{MODEL}").json()["default_sampling"] for http in (auto, none)]
    neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert told == [{**neutral, "temperature": 0.75, "top_k": 1}, neutral]
    asked = {"model": MODEL, "input": "Hello", "max_output_tokens": 1}
    assert auto.post("/v1/responses", json=asked).json()["temperature"] == 0.75
    assert auto.post("/v1/responses", json={**asked, "temperature": 0.5}).json()["temperature"] == 0.5


def test_a_turn_keeps_the_values_it_began_with(auto: httpx.Client, none: httpx.Client, reference: Reference) -> None:
    """It pauses where they hold, and a copy of it goes on where others do."""
    session = f"/v1/sessions/{auto.post('/v1/sessions').json()['id']}"
    auto.post(f"{session}/breakpoints", json={"layer": 1, "action": "pause", "once": True}).raise_for_status()
    asked = {"messages": CHAT, "max_tokens": COUNT}
    assert auto.post(f"{session}/generate", json=asked).json()["status"] == "paused"
    content = auto.get(f"{session}/export").content
    copied = none.post("/v1/sessions/import", content=content).raise_for_status().json()["id"]
    greedy = reference.decode(reference.greedy(reference.chat(CHAT), COUNT))
    for http, name in ((auto, session), (none, f"/v1/sessions/{copied}")):
        assert http.post(f"{name}/resume", json={}).json()["text"] == greedy


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [
        ("top_k", 2.5, "an integer from -1 to 2147483647; got 2.5"),
        ("repetition_penalty", float("nan"), "a number from 0.01 to 100; got NaN"),
    ],
)
def test_a_value_that_no_client_may_give_is_refused_at_the_start(
    reference: Reference, tmp_path: Path, field: str, value: object, wrong: str
) -> None:
    model = resolve(str(says(reference, tmp_path, **{field: value})), cache_dir=tmp_path)
    file = tmp_path.resolve() / MODEL / "generation_config.json"
    with pytest.raises(BrokenModel) as refused:
        sampling_defaults(model, "auto")
    assert refused.value.message.startswith(f"{file}: {field}: {wrong}")
    assert sampling_defaults(model, "none") == NEUTRAL


@pytest.mark.parametrize("text", ["", "[1]", '{"top_p": '])
def test_a_file_that_cannot_be_read_is_named(reference: Reference, tmp_path: Path, text: str) -> None:
    folder = says(reference, tmp_path)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(BrokenModel, match=r"generation_config\.json"):
        sampling_defaults(resolve(str(folder), cache_dir=tmp_path), "auto")


def test_a_model_without_the_file_is_sampled_as_the_catalogue_says(tmp_path: Path) -> None:
    assert sampling_defaults(resolve("random:tiny-llama", cache_dir=tmp_path), "auto") == NEUTRAL
    [entry] = CATALOG.values()
    config = resolve("random:tiny-llama", cache_dir=tmp_path).config
    model = ResolvedModel(entry.name, config, None, 0, sampling=entry.sampling)
    assert sampling_defaults(model, "auto") == SamplingDefaults(temperature=0.2, top_p=0.9)
    assert sampling_defaults(model, "none") == NEUTRAL
