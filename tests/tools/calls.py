"""Families of models, and how each writes calls of tools."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken

from app.tools.calls import CallReader
from app.tools.definitions import Tool
from app.tools.formats import HARMONY, HERMES, LLAMA, MISTRAL, TOOL_FORMATS, ToolFormat
from app.tools.reader import FamilyReader
from app.tools.thinking import HarmonyReader
from tests.hugging_face import byte_tokenizer

FORMATS = pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA], ids=lambda form: form.name)
ALL_FORMATS = pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)

TOOLS = [Tool(name) for name in ("f", "g", "add", "edit")]


def write(form: ToolFormat, *calls: tuple[str, str]) -> str:
    """An answer with calls, each of which is a name and its arguments in JSON."""
    return form.write_all([form.write(json.dumps(name), arguments) for name, arguments in calls])


TOKENIZER = byte_tokenizer(300)
TOKENIZER.add_tokens([AddedToken(f"<{index}>", special=True) for index in range(20)])
VOCABULARY: LLTokenizer = from_tokenizer(TOKENIZER, n_vocab=330)
"""Tokens from 300 on are markers, whatever their texts are."""


def takes(grammar: str, *parts: str | int) -> bool:
    """Whether the parts, texts or tokens, are a whole answer."""
    matcher = LLMatcher(VOCABULARY, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = [each for part in parts for each in ([part] if isinstance(part, int) else part.encode())]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def reader_of(form: ToolFormat, tools: Sequence[Tool], **options: Any) -> CallReader | FamilyReader | HarmonyReader:
    """What reads the answers of that family."""
    if form is HARMONY:
        return HarmonyReader(tools, **options)
    return (CallReader if form.begin else FamilyReader)(form, tools, **options)
