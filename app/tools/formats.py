"""How each family of models writes a call of a tool, by what its chat template says."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

CONTENT = "content"
CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's way to write calls: `opening` call `separator` call ... `closing`.

    A call is `before` {"name": NAME, `arguments_key`: ARGUMENTS} `after`.
    """

    name: str
    arguments_key: str
    region: Callable[[], dict[str, Any]]
    """The part of a response template that finds calls in text."""
    marker: str = ""
    """The text or special token that begins calls; empty where a call is all of an answer."""
    opening: str = ""
    before: str = ""
    after: str = ""
    separator: str = ""
    closing: str = ""
    id_characters: int = 24
    """Length of a call's id without its prefix; templates may check it."""
    id_prefix: str = "call_"
    can_repeat: bool = True
    """Whether an answer may hold several calls."""

    def write(self, name: str, arguments: str) -> str:
        """One call as text. `name` and `arguments` are JSON texts."""
        return f'{self.before}{{"name": {name}, "{self.arguments_key}": {arguments}}}{self.after}'

    def write_all(self, calls: list[str]) -> str:
        """Calls that `write` has made, as one text."""
        return self.opening + self.separator.join(calls) + self.closing

    def response_template(self) -> ResponseTemplate:
        """Tells content from calls."""
        content = {"content": "text", "content_args": {"strip": False}}
        calls = {"content": "text", "content_args": {"strip": False}, "repeats": True, **self.region()}
        # The text that is read begins with the answer, so the anchor is never looked for.
        return load_response_template({"start_anchor": "\0", "fields": {CONTENT: content, CALLS: calls}})


HERMES = ToolFormat(
    "hermes",
    "arguments",
    partial(dict, open="<tool_call>", close="</tool_call>"),
    marker="<tool_call>",
    before="<tool_call>\n",
    after="\n</tool_call>",
    separator="\n",
)
"""Hermes, Qwen 2.5 and 3, SmolLM3, and every model whose template has no form of its own."""

MISTRAL = ToolFormat(
    "mistral",
    "arguments",
    partial(dict, open="[TOOL_CALLS]"),
    marker="[TOOL_CALLS]",
    opening="[TOOL_CALLS] [",
    separator=", ",
    closing="]",
    id_characters=9,
    id_prefix="",
)
"""Mistral and Mixtral up to the third version of their tokenizer."""

LLAMA = ToolFormat(
    "llama",
    "parameters",
    partial(dict, open_pattern=r'\A\s*(?:<\|python_tag\|>)?(?=\{\s*"name"\s*:)'),
    can_repeat=False,
)
"""Llama 3.1 and later: the call is the whole answer."""

_SIGNS = (("[TOOL_CALLS]", MISTRAL), ("<tool_call>", HERMES), ('"parameters": ', LLAMA))


def find_format(chat_template: str | None) -> ToolFormat:
    """The format that the source of a chat template shows."""
    return next((form for sign, form in _SIGNS if chat_template and sign in chat_template), HERMES)
