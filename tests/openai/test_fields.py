"""Fields that a client leaves out: the checkpoint's are taken. Fields without effect: named and counted, or refused."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.domain.values import NEUTRAL, SamplingDefaults
from app.main import sampling_defaults
from app.model_store.install import BrokenModel
from app.model_store.pull import CATALOG
from app.model_store.resolve import ResolvedModel, resolve
from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference, save_tiny_model
from tests.serving import serve

CHAT: Any = [{"role": "user", "content": "Hello"}]
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


HEADER = "X-Djinn-Ignored"
CACHED = {"type": "text", "text": "x", "cache_control": {"type": "e"}}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"model": MODEL, "messages": CHAT, "max_tokens": 1},
    "/v1/completions": {"model": MODEL, "prompt": "x", "max_tokens": 1},
    "/v1/responses": {"model": MODEL, "input": "x", "max_output_tokens": 1, "store": False},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [65]},
}


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_named_on_every_route(http: httpx.Client, path: str) -> None:
    response = http.post(path, json={**BODIES[path], "extra_field": 1})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "extra_field"
    assert HEADER not in http.post(path, json=BODIES[path]).headers
    assert http.post(f"{path}?api-version=1&a=2&a=3", json=BODIES[path]).headers[HEADER] == "api-version, a"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"store": True}, "store"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),  # without tools
        ({"reasoning_effort": "low", "verbosity": "high"}, "reasoning_effort, verbosity"),
        ({"moderation": {"model": "m", "policy": {"input": {"mode": "score"}}}}, "moderation"),
        ({"prediction": {"type": "content", "content": "x"}, "prompt_cache_options": {}}, "prediction"),
        ({"messages": [{"role": "user", "content": [CACHED]}]}, "messages.0.content.0.cache_control"),
        ({"response_format": {"type": "text", "strict": True}}, "response_format.strict"),
    ],
)
def test_what_has_no_effect_is_named(http: httpx.Client, fields: Any, ignored: str, stream: bool) -> None:
    body = {**BODIES["/v1/chat/completions"], "stream": stream, **fields}
    assert http.post("/v1/chat/completions", json=body).headers[HEADER] == ignored


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({"include_usage": True, "include_obfuscation": True}, "stream_options.include_obfuscation"),
        ({"include_usage": False, "continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
    ],
)
def test_options_of_a_stream_without_effect_are_named(http: httpx.Client, options: Any, ignored: str) -> None:
    body = {**BODIES["/v1/completions"], "stream": True, "stream_options": options}
    answer = http.post("/v1/completions", json=body)
    assert answer.headers[HEADER] == ignored
    assert ('"usage":{' in answer.text) is options["include_usage"]


@pytest.mark.parametrize(
    "nothing",
    [
        {"store": False, "metadata": None, "unheard_of": None, "parallel_tool_calls": True},
        {"modalities": ["text"], "functions": [], "function_call": "none", "prediction": None, "stop": None},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "service_tier": "auto"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"cache_prompt": True, "id_slot": -1, "use_beam_search": False, "suffix": "", "best_of": 1},
        {"messages": [*CHAT, {"role": "assistant", "content": "", "annotations": [], "audio": None, "tool_calls": []}]},
    ],
)
def test_a_value_that_asks_for_nothing_is_not_named(http: httpx.Client, nothing: Any) -> None:
    response = http.post("/v1/chat/completions", json={**BODIES["/v1/chat/completions"], **nothing})
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers


def test_the_header_is_bounded_and_has_only_safe_characters(http: httpx.Client) -> None:
    odd = {"a,b\r\nX-Evil: 1": 1, "Gr\u00fc\u00dfe": 1, "y" * 5000: 1, "": 1}
    named = http.post("/tokenize", json={"prompt": "x", **odd}).headers
    assert named[HEADER].split(", ") == ["a?b??X-Evil:?1", "Gr??e", "y" * 64, "?"]
    assert "x-evil" not in named
    many = {f"field_{number}": number for number in range(30)}
    names = http.post("/tokenize", json={"prompt": "x", **many}).headers[HEADER].split(", ")
    assert names == [*list(many)[:20], "..."]


@pytest.mark.parametrize(
    "hostile",
    [
        {f"k{number}": number for number in range(9_000)},
        {"messages": [{"role": "user", "content": "x", f"k{number}": number} for number in range(5_000)]},
    ],
    ids=["in the body", "in messages"],
)
def test_unknown_fields_without_number_cost_little(http: httpx.Client, hostile: Any) -> None:
    response = http.post("/tokenize", json={"messages": CHAT, **hostile}, timeout=5)
    assert response.status_code == 200, response.text
    assert len(response.headers[HEADER]) < 21 * 66


def counted(http: httpx.Client) -> dict[str, float]:
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    samples = families["djinn_ignored_fields"].samples
    return {sample.labels["field"]: sample.value for sample in samples if sample.name.endswith("_total")}


def test_ignored_fields_are_counted_by_known_names(http: httpx.Client) -> None:
    before = counted(http)
    messages = [{"role": "user", "content": "x", "name": "Ada", "shoe_size": 44}]
    http.post("/tokenize", json={"messages": messages, "store": True, "nobody_knows": 1, "nor": 2})
    after = counted(http)
    more = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name)}
    assert more == {"store": 1, "messages.name": 1, "other": 3}


@pytest.fixture(scope="module")
def strict(reference: Reference) -> Iterator[httpx.Client]:
    """A server that refuses fields without effect."""
    with serve(model=str(reference.folder), strict_fields=True) as url, httpx.Client(base_url=url, timeout=30) as http:
        yield http


@pytest.mark.parametrize("path", BODIES)
def test_a_strict_server_refuses_the_first(strict: httpx.Client, path: str) -> None:
    response = strict.post(path, json={**BODIES[path], "store": False, "first": 1, "second": 2})
    assert "strict" in assert_error(response, 400, "field_out_of_range", param="first")
    assert strict.post(path, json={**BODIES[path], "store": False}).status_code == 200
    named = {"messages": [{"role": "user", "content": "x", "name": "Ada"}]}  # the template leaves the name out
    assert_error(strict.post("/tokenize", json=named), 400, "field_out_of_range", param="messages.0.name")


def test_the_document_has_400_where_the_others_have_422(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            found = {"400", "422"} & operation["responses"].keys()
            of_another_api = bool({"openai", "anthropic"} & {*operation.get("tags", ())})
            assert ("422" in found) is not of_another_api, path
            if of_another_api:
                assert "400" in found
    assert "HTTPValidationError" not in document["components"]["schemas"]


USER = {"role": "user", "content": "What time is it?"}
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant', 'tool', 'critic', 'ghost') %}"
    "{{ raise_exception('only known roles') }}{% endif %}"
    "{% if message['role'] != 'ghost' %}{{ message['role'] + ': ' + message['content'] }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{{ message.reasoning_content or '' }}{{ message.grade or '' }}{{ '\\n' }}{% endfor %}"
)
"""It takes two roles of its own, one of which it leaves out, reads two more fields, and writes calls of tools."""


@pytest.mark.parametrize(
    ("messages", "ignored"),
    [
        ([USER, {"role": "assistant", "content": "Now.", "name": "Bob"}, USER], "messages.1.name"),
        (
            [{**USER, "name": "Ada"}, {**USER, "mood": "sad", "name": "Ada"}],
            "messages.0.name, messages.1.mood, messages.1.name",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_fields_that_the_template_leaves_out_are_named(
    http: httpx.Client, path: str, messages: Any, ignored: str
) -> None:
    body = {"model": MODEL, "messages": messages, "return_token_strs": None}
    response = http.post(path, json=body if path == "/tokenize" else {**body, "max_tokens": 1})
    assert response.status_code == 200, response.text
    assert sorted(response.headers["X-Djinn-Ignored"].split(", ")) == sorted(ignored.split(", "))


@pytest.fixture(scope="module")
def choosy_model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder: Path = tmp_path_factory.mktemp("models") / MODEL
    save_tiny_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Reference(folder)


@pytest.fixture(scope="module")
def choosy(choosy_model: Reference) -> Iterator[httpx.Client]:
    """A server of the tiny model with that template."""
    with serve(model=str(choosy_model.folder)) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def test_calls_that_a_template_writes_are_those_of_transformers(choosy: httpx.Client, choosy_model: Reference) -> None:
    def chat(arguments: object) -> list[dict[str, Any]]:
        call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}
        answer = {"role": "tool", "tool_call_id": "c1", "content": "12:00"}
        return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answer]

    prompt = choosy_model.chat(chat({"zone": "UTC"}))
    assert 'now({"zone": "UTC"})' in choosy_model.decode(prompt)
    body = {"model": MODEL, "messages": chat('{"zone": "UTC"}'), "temperature": 0, "max_tokens": 8}
    answer = choosy.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == choosy_model.decode(choosy_model.greedy(prompt, 8))


def text_of(http: httpx.Client, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """What the template makes of the messages, and the fields that it left out."""
    response = http.post("/tokenize", json={"messages": messages})
    assert response.status_code == 200, response.text
    text = http.post("/detokenize", json={"tokens": response.json()["tokens"]}).json()["prompt"]
    return text, response.headers.get("X-Djinn-Ignored", "")


def test_a_role_and_a_field_of_the_templates_own_reach_it(choosy: httpx.Client) -> None:
    critic = {"role": "critic", "content": [{"type": "text", "text": "Dull."}], "grade": "D", "hat": "grey"}
    assert text_of(choosy, [USER, critic]) == ("user: What time is it?\ncritic: Dull.D\n", "messages.1.hat")
    said = {"role": "assistant", "content": "Noon.", "reasoning_content": "The sun is high."}
    assert text_of(choosy, [USER, said]) == ("user: What time is it?\nassistant: Noon.The sun is high.\n", "")


@pytest.mark.parametrize(
    ("roles", "param", "code"),
    [
        (["user", "narrator"], "messages.1.role", "malformed_request"),
        (["bard", "user", "narrator"], "messages.0.role", "malformed_request"),
        (["user", "ghost"], "messages.1.role", "field_out_of_range"),
        ([f"role {number}" for number in range(9)], "messages", "field_out_of_range"),
    ],
)
def test_a_role_without_a_place_is_refused(choosy: httpx.Client, roles: list[str], param: str, code: str) -> None:
    messages = [{"role": role, "content": "x"} for role in roles]
    assert_error(choosy.post("/tokenize", json={"messages": messages}), 400, code, param=param)
    without_content = {"messages": [USER, {"role": "critic"}]}
    assert_error(choosy.post("/tokenize", json=without_content), 400, "malformed_request", param="messages")


def test_more_fields_than_are_tried_are_refused_unless_all_are_left_out(choosy: httpx.Client) -> None:
    many = {f"field {number}": number for number in range(9)}
    assert text_of(choosy, [{**USER, **many}])[1].count("messages.0.field?") == 9
    response = choosy.post("/tokenize", json={"messages": [{**USER, **many, "grade": "A"}]})
    assert "at most 8 fields" in assert_error(response, 400, "field_out_of_range", param="messages")
