"""The page of the Python client's classes, from their docstrings."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, get_type_hints

from pydantic import BaseModel

import djinn
from client.calls import TurnOptions
from client.edits import EditOptions
from docs.site.markdown import table

HEAD = """# Every class of the client

Every public class of `djinn`, from its docstrings. The [guide](../client.md) shows how they go together.
`Djinn` blocks. `AsyncDjinn` and the other classes named `Async...` have the same methods, awaited.

"""
ENTRIES = ("Djinn", "Sessions", "Session", "TurnStream", "Breakpoint", "Checkpoint", "Vectors")
"""Classes with calls, in the order in which one meets them."""
OPTIONS = (TurnOptions, EditOptions)
WIDTH = 76


def client_page() -> str:
    """The page: classes with calls, then values, then errors."""
    kinds = [name for name in djinn.__all__ if inspect.isclass(getattr(djinn, name))]
    others = [name for name in kinds if not name.startswith("Async") and name not in ENTRIES]
    is_error = {name: issubclass(getattr(djinn, name), Exception) for name in others}
    calls = [name for name in djinn.__all__ if inspect.isfunction(getattr(djinn, name))]
    parts = [
        "## Calls",
        *map(_calls, ENTRIES),
        *map(_function, calls),
        "## Options",
        *map(_option, OPTIONS),
        "## Values",
    ]
    parts += [_value(name) for name in others if not is_error[name]]
    parts += ["## Errors", *(_section(name) for name in others if is_error[name])]
    return HEAD + "\n\n".join(part.strip() for part in parts) + "\n"


def _section(name: str) -> str:
    kind = getattr(djinn, name)
    of = f" of `{kind.__base__.__name__}`" if issubclass(kind, Exception) and name != "DjinnError" else ""
    return f"### `{name}`\n\n{f'A kind{of}. ' if of else ''}{inspect.cleandoc(kind.__doc__ or '')}"


def _calls(name: str) -> str:
    kind = getattr(djinn, name)
    shown = [_section(name)]
    for member, value in _members(kind):
        doc = inspect.getdoc(value)
        if isinstance(value, property):
            shown.append(f"#### `{member}` {{ #{name}.{member} }}\n\n{doc}")
        elif callable(value):
            signature = _signature(value)
            shown.append(f"#### `{member}` {{ #{name}.{member} }}\n\n```python\n{member}{signature}\n```\n\n{doc}")
    return "\n\n".join(shown)


def _function(name: str) -> str:
    call = getattr(djinn, name)
    return f"### `{name}`\n\n```python\n{name}{_signature(call)}\n```\n\n{inspect.getdoc(call)}"


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public members with a docstring, those of bases last."""
    seen: set[str] = set()
    for owner in kind.__mro__[:-1]:
        for name, value in vars(owner).items():
            if not name.startswith("_") and name not in seen and inspect.getdoc(value):
                seen.add(name)
                yield name, value


def _signature(call: Any) -> str:
    """The signature as the code has it, without `self`."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(call)))).body
    assert isinstance(node, ast.FunctionDef)
    node.args.args = node.args.args[1:]
    arguments = re.sub(r"(?<=[\w\]])=", " = ", ast.unparse(node.args))
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    fits = len(arguments) + len(returned) <= WIDTH
    if fits:
        return f"({arguments}){returned}"
    lines = re.sub(r", (?=\w+: )", ",\n    ", arguments)
    return f"(\n    {lines},\n){returned}"


def _option(kind: Any) -> str:
    """A set of options that several calls take."""
    rows = [(f"`{name}`", f"`{_type(hint)}`") for name, hint in get_type_hints(kind).items()]
    doc = inspect.cleandoc(kind.__doc__ or "")
    return f"### `{kind.__name__}`\n\n{doc}\n\n{table(('option', 'type'), rows)}"


def _value(name: str) -> str:
    kind = getattr(djinn, name)
    hints = kind.model_fields if issubclass(kind, BaseModel) else get_type_hints(kind)
    rows = [(f"`{field}`", f"`{_type(getattr(hint, 'annotation', hint))}`") for field, hint in hints.items()]
    return f"{_section(name)}\n\n{table(('field', 'type'), rows)}"


def _type(hint: Any) -> str:
    """A type without the modules of its names."""
    shown = inspect.formatannotation(hint)
    return re.sub(r"\b(?:client|typing|collections|numpy)\.(?:\w+\.)*(?=\w)", "", shown)
