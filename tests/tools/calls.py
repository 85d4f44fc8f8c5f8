"""Families of models, and how each writes calls of tools."""

import json

import pytest

from app.tools.definitions import HERMES, LLAMA, MISTRAL, Tool, ToolFormat

FORMATS = pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA], ids=lambda form: form.name)

TOOLS = [Tool(name) for name in ("f", "g", "add", "edit")]


def write(form: ToolFormat, *calls: tuple[str, str]) -> str:
    """An answer with calls, each of which is a name and its arguments in JSON."""
    return form.write_all([form.write(json.dumps(name), arguments) for name, arguments in calls])
