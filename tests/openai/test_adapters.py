"""Models that clients name: the base, and LoRA adapters. `tests/gpu/test_adapters.py` compares their tokens."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from app.domain.errors import BadAdapter
from app.main import load_app
from tests.adapters import make_adapter
from tests.durability.restarting import serving
from tests.errors import assert_error
from tests.serving import tiny_settings

GREEDY: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 6, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
ITEMS: dict[str, Any] = {"input": "Hi", "max_output_tokens": 4}
FILE = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def folders(roomy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters for the tiny model, in `one` and `inside/two`."""
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(roomy_model, folder / "one", 1)
    make_adapter(roomy_model, folder / "inside" / "two", 2)
    (folder / "inside" / "link").symlink_to(folder / "one")
    return folder


def test_adapters_come_and_go_and_their_sessions_stay(roomy_model: Path, folders: Path, tmp_path: Path) -> None:
    base = {"model": str(roomy_model), "served_model_name": ("base", "also"), "kv_disk": 1 << 22}
    with serving(tmp_path, lora=(f"one={folders / 'one'}",), lora_dir=folders / "inside", **base) as http:
        loaded = change(http, "load", "two", "two").json()
        listed = {each["id"]: each for each in http.get("/v1/models").json()["data"]}
        assert [(name, each["parent"]) for name, each in listed.items()] == [
            ("base", None),
            ("also", None),
            ("one", "base"),
            ("two", "base"),
        ]
        assert listed["two"] == loaded == http.get("/v1/models/two").json()
        answers = [ask(http, "completions", model, GREEDY).json() for model in listed]
        assert [answer["model"] for answer in answers] == ["base", "base", "one", "two"]
        base_text, also, *others = (answer["choices"][0]["text"] for answer in answers)
        assert (base_text, len({base_text, *others})) == (also, 3)
        check_refusals(http, folders)
        generate = f"/v1/sessions/{check_sessions(http)}/generate"
        held = http.get("/v1/memory").json()["adapters"]
        assert (held["count"], held["bytes"] > 0) == (2, True)
        assert change(http, "unload", "two").json()["deleted"]
        refused = http.post(generate, json=GREEDY)
        assert "'two'" in assert_error(refused, 409, "adapter_not_loaded", param="model")
        change(http, "load", "zwei", "two")
        assert http.post(generate, json=GREEDY).json()["usage"]["cached_tokens"] > 0
        file = http.get(generate.replace("generate", "export")).content
        assert http.post("/v1/sessions/import", content=file, headers=FILE).json()["adapter"] == "zwei"
        assert http.post(generate.replace("generate", "fork")).json()["adapter"] == "two"
    with serving(tmp_path, **base) as http:
        refused = http.post(generate, json=GREEDY)
        assert "'two'" in assert_error(refused, 409, "adapter_not_loaded", param="model")
        refused = http.post("/v1/sessions/import", content=file, headers=FILE)
        assert "'two'" in assert_error(refused, 422, "bad_export")
        assert "--lora-dir" in assert_error(change(http, "load", "two", "two"), 422, "field_out_of_range", param="path")
    with serving(tmp_path, lora=(f"deux={folders / 'inside' / 'two'}",), **base) as http:
        assert http.post(generate, json=GREEDY).status_code == 200


def change(http: httpx.Client, how: str, name: str, path: str | None = None) -> httpx.Response:
    return http.post(f"/v1/models/{how}", json={"name": name} | ({} if path is None else {"path": path}))


def ask(http: httpx.Client, path: str, model: str, body: dict[str, Any], session: str | None = None) -> httpx.Response:
    headers = {} if session is None else {"X-Session-ID": session}
    return http.post(f"/v1/{path}", json={"model": model, **body}, headers=headers)


def check_refusals(http: httpx.Client, folders: Path) -> None:
    """Nothing is told of files outside the folder of adapters."""
    for path in ("../one", str(folders / "one"), "link", "/", "x" * 3000, "\0"):
        refused = change(http, "load", "new", path)
        assert str(folders) not in assert_error(refused, 422, "field_out_of_range", param="path")
    for how, name, where, status, code, param in (
        ("load", "new", "none", 422, "bad_adapter", "path"),
        ("load", "two", "two", 409, "wrong_state", "name"),
        ("load", "base", "two", 422, "field_out_of_range", "name"),
        ("load", "a b", "two", 422, "field_out_of_range", "name"),
        ("unload", "also", None, 422, "field_out_of_range", "name"),
        ("unload", "none", None, 404, "model_not_found", "model"),
    ):
        assert_error(change(http, how, name, where), status, code, param=param)
    message = assert_error(ask(http, "sessions", "none", {}), 404, "model_not_found", param="model")
    assert "'base', 'also', 'one', 'two'" in message


def check_sessions(http: httpx.Client) -> str:
    """Each model has its own session of one name, and a session keeps its model. Returns one of the adapter `two`."""
    models = ("base", "two", "one", "two", "also")
    found = [ask(http, "chat/completions", model, CHAT, "mine").headers["x-session-id"] for model in models]
    assert (len(set(found)), found[1], found[0]) == (3, found[3], found[4])
    for path, body in (("chat/completions", CHAT), ("messages", CHAT), ("responses", ITEMS)):
        assert "'one'" in ask(http, path, "two", body, found[2]).json()["error"]["message"]
        assert ask(http, path, "one", body, found[2]).json()["model"] == "one"
    first = ask(http, "responses", "two", ITEMS).json()["id"]
    assert ask(http, "responses", "base", ITEMS | {"previous_response_id": first}).json()["model"] == "base"
    talk = ITEMS | {"conversation": http.post("/v1/conversations", json={}).json()["id"]}
    assert ask(http, "responses", "one", talk).json()["model"] == "one"
    assert_error(ask(http, "responses", "base", talk), 409, "wrong_state", param="model")
    vectors = [ask(http, "embeddings", model, {"input": "Hi"}).json()["data"] for model in models[:3]]
    assert len({str(each) for each in vectors}) == 3
    session = ask(http, "sessions", "two", {}).json()
    assert session["adapter"] == "two"
    assert http.post(f"/v1/sessions/{session['id']}/generate", json=GREEDY).status_code == 200
    return str(session["id"])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"lora": ("one=/nowhere",)}, BadAdapter, "there is no file /nowhere/adapter_config.json"),
        ({"served_model_name": "x", "lora": ("x=y",)}, ValueError, "'x' is there twice"),
        ({"lora": ("one",)}, ValueError, "'one' is not NAME=FOLDER"),
        ({"served_model_name": ("a b",)}, ValueError, "'a b' is no name of a model"),
    ],
)
def test_a_server_says_what_is_wrong_with_its_models(changed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_app(tiny_settings(**changed))
