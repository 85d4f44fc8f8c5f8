"""Fields without effect and roles that the template does not write: named in the answer and counted, or refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference, save_tiny_model
from tests.serving import serve

HEADER = "X-Djinn-Ignored"
CHAT: Any = [{"role": "user", "content": "Hello"}]
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
