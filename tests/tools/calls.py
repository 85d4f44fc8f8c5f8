"""Families of models, and how each writes calls of tools."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from app.tools.calls import CallReader
from app.tools.definitions import Tool
from app.tools.formats import HARMONY, HERMES, LLAMA, MISTRAL, TOOL_FORMATS, ToolFormat
from app.tools.harmony import HarmonyReader
from app.tools.reader import FamilyReader

FORMATS = pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA], ids=lambda form: form.name)
ALL_FORMATS = pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)

TOOLS = [Tool(name) for name in ("f", "g", "add", "edit")]


def write(form: ToolFormat, *calls: tuple[str, str]) -> str:
    """An answer with calls, each of which is a name and its arguments in JSON."""
    return form.write_all([form.write(json.dumps(name), arguments) for name, arguments in calls])


def reader_of(form: ToolFormat, tools: Sequence[Tool], **options: Any) -> CallReader | FamilyReader | HarmonyReader:
    """What reads the answers of that family."""
    if form is HARMONY:
        return HarmonyReader(tools, **options)
    return (CallReader if form.begin else FamilyReader)(form, tools, **options)
