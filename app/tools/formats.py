"""How each family of models talks: how it thinks, how it writes calls of tools, and what ends them.

Everything else is made from these descriptions: the readers of answers, the grammars that hold a turn, and the calls of
a history that a template does not write itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

NAME, ARGUMENTS, IS_TEXT = "NAME", "ARGUMENTS", "IS_TEXT"
"""Where a call has its name and its arguments, and where a parameter says what its value is."""
PYTHON_TAG = "<|python_tag|>"
"""Begins a call of Llama, if anything does."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's way to write calls: `opening` `before` `call` `after` `separator` `before` `call` ... `closing`."""

    name: str
    call: str = '{"name": NAME, "arguments": ARGUMENTS}'
    """One call. A name in an object is a JSON text, any other is written as it is."""
    marker: str = ""
    """The text or special token that begins calls; empty where a call is all of an answer."""
    end_marker: str = ""
    """What ends a call, if anything does."""
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
    has_names: bool = False
    """Whether newer models of the family write a name after the marker, then the object of the arguments."""
    inner_markers: tuple[str, ...] = ()
    """What may stand within a call."""
    begin: str = ""
    """Begins one call, up to `end_marker`: then a call is read when it is whole. Empty: calls are read as JSON that
    comes, and `end_marker` is no more than a hint.
    """
    pair: tuple[str, str, str] | None = None
    """What stands before a parameter's name, between it and the value, and after that, where arguments are no JSON.
    `IS_TEXT` in the middle stands for true or false: whether the value is a text, or JSON.
    """
    is_pythonic: bool = False
    """Whether the model may also write calls as Python does."""
    text_quote: str = ""
    """What stands around texts in arguments that are JSON but for that and for names without quotation marks."""

    @property
    def head(self) -> str:
        """A call up to its arguments."""
        return self.call.partition(ARGUMENTS)[0]

    @property
    def tail(self) -> str:
        """A call after its arguments."""
        return self.call.partition(ARGUMENTS)[2]

    @property
    def markers(self) -> frozenset[str]:
        """All texts that may be tokens: what an answer with calls is read by."""
        sections = (part.strip() for part in (self.opening, self.closing) if self.begin)
        return frozenset({self.marker, self.end_marker, self.begin, *self.inner_markers, *sections} - {""})

    @property
    def begins(self) -> frozenset[str]:
        """Those that begin calls in the middle of text."""
        return frozenset({self.marker or PYTHON_TAG, self.begin, self.opening.strip() if self.begin else ""} - {""})

    def write_head(self, name: str) -> str:
        """A call up to its arguments. `name` is a JSON text."""
        is_plain = '"name": NAME' not in self.call and name.startswith('"')
        return self.head.replace(NAME, json.loads(name) if is_plain else name)

    def write(self, name: str, arguments: str) -> str:
        """One call as text. `name` and `arguments` are JSON texts."""
        written = arguments if self.pair is None else "".join(_pairs(arguments, self.pair))
        return f"{self.before}{self.write_head(name)}{written}{self.tail}{self.after}"

    def write_all(self, calls: list[str]) -> str:
        """Calls that `write` has made, as one text."""
        return self.opening + self.separator.join(calls) + self.closing


def _pairs(arguments: str, pair: tuple[str, str, str]) -> Iterator[str]:
    try:
        found: Any = json.loads(arguments)
    except ValueError:
        found = None
    begin, middle, end = pair
    for key, value in found.items() if isinstance(found, dict) else ():
        is_text = isinstance(value, str)
        yield f"{begin}{key}{told(middle, is_text=is_text)}{value if is_text else json.dumps(value)}{end}"


def told(middle: str, *, is_text: bool) -> str:
    """What stands between the name of a parameter and its value."""
    return middle.replace(IS_TEXT, "true" if is_text else "false")


HERMES = ToolFormat(
    "hermes",
    marker="<tool_call>",
    end_marker="</tool_call>",
    before="<tool_call>\n",
    after="\n</tool_call>",
    separator="\n",
)
"""Hermes, Qwen 2.5 and 3, SmolLM3, and every model whose template has no form of its own."""

MISTRAL = ToolFormat(
    "mistral",
    marker="[TOOL_CALLS]",
    opening="[TOOL_CALLS] [",
    separator=", ",
    closing="]",
    id_characters=9,
    id_prefix="",
    has_names=True,
    inner_markers=("[CALL_ID]", "[ARGS]"),
)
"""Mistral and Mixtral; `write` is for the third version of their tokenizer and those before it."""

MISTRAL_NAMES = replace(
    MISTRAL, name="mistral_v11", call="NAME[ARGS]ARGUMENTS", opening="", before="[TOOL_CALLS]", separator="", closing=""
)
"""From the eleventh version of the tokenizer on."""

LLAMA = ToolFormat("llama", '{"name": NAME, "parameters": ARGUMENTS}', can_repeat=False)
"""Llama 3.1 and later: the call is the whole answer."""

QWEN_CODER = ToolFormat(
    "qwen3_coder",
    "<function=NAME>\nARGUMENTS</function>",
    marker="<tool_call>",
    before="<tool_call>\n",
    after="\n</tool_call>",
    separator="\n",
    begin="<tool_call>",
    end_marker="</tool_call>",
    pair=("<parameter=", ">\n", "\n</parameter>\n"),
)
"""Qwen3-Coder, Qwen 3.5 and later."""

GLM = ToolFormat(
    "glm",
    "NAME\nARGUMENTS",
    marker="<tool_call>",
    before="<tool_call>",
    after="</tool_call>",
    separator="\n",
    begin="<tool_call>",
    end_marker="</tool_call>",
    pair=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    inner_markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
"""GLM 4.5 and later."""

DEEPSEEK = ToolFormat(
    "deepseek_v31",
    "NAME<｜tool▁sep｜>ARGUMENTS",
    marker="<｜tool▁calls▁begin｜>",
    opening="<｜tool▁calls▁begin｜>",
    before="<｜tool▁call▁begin｜>",
    after="<｜tool▁call▁end｜>",
    closing="<｜tool▁calls▁end｜>",
    begin="<｜tool▁call▁begin｜>",
    end_marker="<｜tool▁call▁end｜>",
    inner_markers=("<｜tool▁sep｜>",),
)
"""DeepSeek V3.1."""

DEEPSEEK_V3 = replace(
    DEEPSEEK, name="deepseek_v3", call="function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```", separator="\n"
)
"""DeepSeek V3 and R1."""

DEEPSEEK_DSML = ToolFormat(
    "deepseek_v32",
    'NAME">\nARGUMENTS',
    marker="<｜DSML｜function_calls>",
    opening="<｜DSML｜function_calls>\n",
    before='<｜DSML｜invoke name="',
    after="</｜DSML｜invoke>",
    separator="\n",
    closing="\n</｜DSML｜function_calls>",
    begin='<｜DSML｜invoke name="',
    end_marker="</｜DSML｜invoke>",
    pair=('<｜DSML｜parameter name="', '" string="IS_TEXT">', "</｜DSML｜parameter>\n"),
    inner_markers=("｜DSML｜",),
)
"""DeepSeek V3.2."""

KIMI = ToolFormat(
    "kimi_k2",
    "functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS",
    marker="<|tool_calls_section_begin|>",
    opening="<|tool_calls_section_begin|>",
    before="<|tool_call_begin|>",
    after="<|tool_call_end|>",
    closing="<|tool_calls_section_end|>",
    begin="<|tool_call_begin|>",
    end_marker="<|tool_call_end|>",
    inner_markers=("<|tool_call_argument_begin|>",),
)
"""Kimi K2. The model counts the calls of a chat in place of the 0."""

MINIMAX = ToolFormat(
    "minimax_m2",
    'NAME">\nARGUMENTS',
    marker="<minimax:tool_call>",
    opening="<minimax:tool_call>\n",
    before='<invoke name="',
    after="</invoke>",
    separator="\n",
    closing="\n</minimax:tool_call>",
    begin='<invoke name="',
    end_marker="</invoke>",
    pair=('<parameter name="', '">', "</parameter>\n"),
)
"""MiniMax M2."""

LFM = ToolFormat(
    "lfm2",
    marker="<|tool_call_start|>",
    before="<|tool_call_start|>[",
    after="]<|tool_call_end|>",
    begin="<|tool_call_start|>",
    end_marker="<|tool_call_end|>",
    is_pythonic=True,
)
"""LFM2."""

GEMMA = ToolFormat(
    "gemma4",
    "call:NAMEARGUMENTS",
    marker="<|tool_call>",
    before="<|tool_call>",
    after="<tool_call|>",
    begin="<|tool_call>",
    end_marker="<tool_call|>",
    text_quote='<|"|>',
    inner_markers=('<|"|>',),
)
"""Gemma 4."""

HARMONY = ToolFormat(
    "harmony",
    "NAME <|constrain|>json<|message|>ARGUMENTS",
    marker="<|channel|>",
    before="<|channel|>commentary to=functions.",
    end_marker="<|call|>",
    can_repeat=False,
    inner_markers=("<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>"),
)
"""gpt-oss: an answer is messages, each with a channel, and `<|call|>` ends the turn."""

_SIGNS: tuple[tuple[str, ToolFormat], ...] = (
    (r"<\|channel\|>", HARMONY),
    (r"<\|tool_call>", GEMMA),
    (r"<\|tool_call_start\|>", LFM),
    (r"<minimax:tool_call>", MINIMAX),
    (r"<\|tool_call_argument_begin\|>", KIMI),
    (r"<｜DSML｜", DEEPSEEK_DSML),
    (r"<｜tool▁sep｜>[\s\S]*```json", DEEPSEEK_V3),
    (r"<｜tool▁sep｜>", DEEPSEEK),
    (r"<arg_key>", GLM),
    (r"<tool_call>[\s\S]*<function=", QWEN_CODER),
    (r"\[TOOL_CALLS\][\s\S]*\[ARGS\]", MISTRAL_NAMES),
    (r"\[TOOL_CALLS\]", MISTRAL),
    (r"<tool_call>", HERMES),
    (r'"parameters": ', LLAMA),
)
"""What the source of a chat template has where a family writes so; the first that fits."""
TOOL_FORMATS = tuple(form for _, form in _SIGNS)


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a family thinks before it answers: `open` THOUGHTS `end` `answer` ANSWER."""

    name: str
    open: str
    end: str
    answer: str = ""
    """What begins an answer that is no call."""

    @property
    def markers(self) -> frozenset[str]:
        """All texts that may be tokens."""
        return HARMONY.markers if self is HARMONY_THINKING else frozenset({self.begin, self.end})

    @property
    def begin(self) -> str:
        """What of `open` may be a token: Gemma 4 has one of `<|channel>`, without the name of the channel."""
        name, bracket, _ = self.open.partition(">")
        return name + bracket


HARMONY_THINKING = Thinking(
    "harmony", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"
)
THINKING = (
    HARMONY_THINKING,
    Thinking("think", "<think>", "</think>"),
    Thinking("brackets", "[THINK]", "[/THINK]"),
    Thinking("gemma4", "<|channel>thought\n", "<channel|>"),
    Thinking("seed", "<seed:think>", "</seed:think>"),
    Thinking("command", "<|START_THINKING|>", "<|END_THINKING|>"),
    Thinking("triangles", "◁think▷", "◁/think▷"),
)
"""Most models, Magistral, Gemma 4, Seed-OSS, Command A and Kimi-VL."""


def find_chat_format(chat_template: str | None, named: str | None = None) -> tuple[ToolFormat, Thinking | None]:
    """How a model writes calls, and how it thinks; None: it does not. That is as it is `named`, else as the source of a
    chat template shows. Raises ValueError for an unknown name.
    """
    if named is None:
        source = chat_template or ""
        written = next((form for sign, form in _SIGNS if re.search(sign, source)), HERMES)
        signs = ((each, "<|channel|>" if each is HARMONY_THINKING else each.end) for each in THINKING)
        return written, next((each for each, sign in signs if sign in source), None)
    first, _, second = named.partition("+")
    tools = next((each for each in TOOL_FORMATS if each.name == first), None)
    thoughts_name = second or first
    thinking = next((each for each in THINKING if each.name == thoughts_name), None)
    if tools is None or (second and thinking is None):
        calls, thoughts = (", ".join(each.name for each in group) for group in (TOOL_FORMATS, THINKING))
        raise ValueError(f"{named!r} is neither one of {calls}, nor one of these with + and one of {thoughts}")
    return tools, thinking
