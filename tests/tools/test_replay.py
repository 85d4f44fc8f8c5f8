"""Chats that come back written anew: the prompt goes on from the tokens of the history that mean the same."""

from array import array
from typing import Any

import pytest

from app.domain.values import common_prefix
from app.model_store.shapes import IM_END_ID
from app.openai.chat import chat_prompt
from app.tools.definitions import Tool
from app.tools.formats import ToolFormat
from app.tools.replay import ChatPrompt, go_on
from app.tools.support import ToolSupport
from tests.tools.calls import ALL_FORMATS, write
from tests.tools.test_offering import CHATML, tokens

TEMPLATE = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As that of Qwen 3: thoughts are kept until the user speaks again."""
ODD = 270
"""A token whose text `<270>` is never encoded to it."""
PARAMETERS = {"properties": {"a": {"type": "integer"}, "unit": {"default": "C"}, "deep": {"properties": {"x": {}}}}}
TOOLS = [Tool("add", "sums", PARAMETERS), Tool("edit")]
USER: Any = {"role": "user", "content": "Go on."}
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 and 2?"}]
RESULT: Any = {"role": "tool", "content": "3", "tool_call_id": "a"}


@pytest.fixture(scope="module")
def model() -> ToolSupport:
    return ToolSupport(tokens(TEMPLATE))


def said(content: str, *calls: str, **others: str) -> Any:
    """A message of the assistant that calls `add` with each of those arguments."""
    made = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": each}} for each in calls]
    return {"role": "assistant", "content": content, **({"tool_calls": made} if made else {}), **others}


def prompt_of(model: ToolSupport, chat: Any) -> ChatPrompt:
    return chat_prompt(chat, model._tokens, model, TOOLS)


def sampled(text: str) -> list[int]:
    """The tokens of an answer."""
    first, *others = (list(part.encode()) for part in text.split("<270>"))
    return [*first, *(token for part in others for token in (ODD, *part))]


def replay(model: ToolSupport, wrote: str, *back: Any, before: Any = CHAT) -> tuple[list[int], list[int], ChatPrompt]:
    """A history in which the model `wrote` that, what is new in the chat that comes `back` after it, and its prompt."""
    asked = prompt_of(model, CHAT).token_ids
    history = [*asked, *sampled(wrote), IM_END_ID]
    prompt = prompt_of(model, [*before, *back])
    ends = [index for index, token in enumerate(prompt.token_ids) if token == IM_END_ID]
    new = prompt.token_ids[ends[len(CHAT)] + 1 :]
    return history, new, go_on(prompt, [(array("I", history), [len(asked)])], model._tokens, model, named=True)


ARGUMENTS = '{"a": 1, "deep": {"x": [1, null]}}'
CALL = '\n<tool_call>\n{"name":"add","arguments":{"a":1,"deep":{"x":[1,null]}}}\n</tool_call>'
HALF = r'"\ud83d"'
THOUGHT = "<think>Hm<270>.</think>"


@pytest.mark.parametrize(
    ("wrote", "back"),
    [
        ("Three<270>", [said("Three<270>"), USER]),
        (" Three<270>\n", [said("Three<270>"), USER]),
        ("Let me see<270>." + CALL, [said("Let me see<270>.", '{"deep": {"x": [1, null]}, "a":   1}'), RESULT]),
        (CALL, [said("", '{"a": 1, "deep": {"x": [1, null], "y": null}, "unit": "C", "z": null}'), RESULT]),
        (CALL.replace("null", HALF), [said("", ARGUMENTS.replace("null", HALF)), RESULT]),
        (THOUGHT + CALL, [said("", ARGUMENTS), RESULT]),
        (THOUGHT + CALL, [said("", ARGUMENTS, reasoning="Hm<270>."), RESULT]),
    ],
    ids=["text", "spaces", "other order", "null and a default", "half a pair", "thoughts dropped", "thoughts kept"],
)
def test_an_answer_that_means_the_same_keeps_its_tokens(model: ToolSupport, wrote: str, back: Any) -> None:
    history, new, found = replay(model, wrote, *back)
    assert found.token_ids == history + new
    assert found.recomputed_because is None


@pytest.mark.parametrize(
    ("wrote", "back", "because"),
    [
        ("Three", [said("Four"), USER], "answer 1: other text"),
        (CALL, [said("", '{"a": true, "deep": {"x": [1, null]}}'), RESULT], "answer 1: other arguments of add"),
        (CALL, [said("", '{"a": 1, "unit": "F"}'), RESULT], "answer 1: other arguments of add"),
        (CALL, [said(""), RESULT], "answer 1: other calls"),
        (THOUGHT + CALL, [said("", ARGUMENTS, reasoning="No."), RESULT], "answer 1: other thinking"),
        (THOUGHT + "Three", [said("Three"), USER], "answer 1: without its thinking"),
    ],
)
def test_an_answer_that_means_something_else_is_computed_as_the_template_has_it(
    model: ToolSupport, wrote: str, back: Any, because: str
) -> None:
    history, _, found = replay(model, wrote, *back)
    assert found.recomputed_because == because
    assert common_prefix(array("I", history), array("I", found.token_ids)) >= len(prompt_of(model, CHAT).token_ids)
    assert found.token_ids == prompt_of(model, [*CHAT, *back]).token_ids or "reasoning" in back[0]


def test_a_chat_that_goes_back_or_begins_anew_says_so_only_if_something_differs(model: ToolSupport) -> None:
    for before, because in ((CHAT, None), (CHAT[:1], "before answer 1"), ([CHAT[1]], "before answer 1")):
        prompt = prompt_of(model, before)
        asked = prompt_of(model, CHAT).token_ids
        pasts = [(array("I", [*asked, 65, IM_END_ID]), [len(asked)])]
        found = go_on(prompt, pasts, model._tokens, model, named=True)
        assert (found.token_ids, found.recomputed_because) == (prompt.token_ids, because)
        other = go_on(prompt, pasts, model._tokens, model, named=False)
        assert other.recomputed_because is None, "it may be another conversation"
    own, prompt = array("I", [*asked, 65, IM_END_ID]), prompt_of(model, [*CHAT, said("A"), USER])
    others = array("I", prompt_of(model, [*CHAT, said("A"), {**USER, "content": "Go back."}, said("B")]).token_ids)
    pasts = [(others, [len(asked), len(others) - 3]), (own, [len(asked)])]
    for known, named, because in ((2, False, None), (1, False, None), (1, True, "before answer 2"), (2, True, None)):
        assert go_on(prompt, pasts[:known], model._tokens, model, named=named).recomputed_because == because


@ALL_FORMATS
def test_every_format_is_recognised_where_the_template_writes_calls_as_text(form: ToolFormat) -> None:
    model = ToolSupport(tokens(CHATML), form.name)
    call = write(form, ("add", '{"a":1}' if form.pair is None else '{"a": 1}'))
    history, new, found = replay(model, "So<270>: " * (form.name not in ("llama", "harmony")) + call, said("x"), USER)
    assert found.recomputed_because == "answer 1: other text"
    content = "So<270>:" * (form.name not in ("llama", "harmony"))
    history, new, found = replay(model, content + " " * bool(content) + call, said(content, '{ "a": 1 }'), USER)
    assert found.token_ids == history + new
