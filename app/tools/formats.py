"""How each family of models writes a call of a tool, by what its chat template says."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's way to write calls: `opening` call `separator` call ... `closing`.

    A call is `before` {"name": NAME, `arguments_key`: ARGUMENTS} `after`.
    """

    name: str
    arguments_key: str
    marker: str = ""
    """The text or special token that begins calls; empty where a call is all of an answer."""
    end_marker: str = ""
    """What ends calls, if anything does."""
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


HERMES = ToolFormat(
    "hermes",
    "arguments",
    marker="<tool_call>",
    end_marker="</tool_call>",
    before="<tool_call>\n",
    after="\n</tool_call>",
    separator="\n",
)
"""Hermes, Qwen 2.5 and 3, SmolLM3, and every model whose template has no form of its own."""

MISTRAL = ToolFormat(
    "mistral",
    "arguments",
    marker="[TOOL_CALLS]",
    opening="[TOOL_CALLS] [",
    separator=", ",
    closing="]",
    id_characters=9,
    id_prefix="",
)
"""Mistral and Mixtral up to the third version of their tokenizer."""

LLAMA = ToolFormat("llama", "parameters", can_repeat=False)
"""Llama 3.1 and later: the call is the whole answer."""

_SIGNS = (("[TOOL_CALLS]", MISTRAL), ("<tool_call>", HERMES), ('"parameters": ', LLAMA))


def find_format(chat_template: str | None) -> ToolFormat:
    """The format that the source of a chat template shows."""
    return next((form for sign, form in _SIGNS if chat_template and sign in chat_template), HERMES)
