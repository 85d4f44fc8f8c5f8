"""What is wrong in a JSON schema, where the compiler of grammars does not say it: endless references, and the place."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

ENDLESS = "a $ref refers to itself, directly or through others: no value can match it"
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values have schemas by names."""
VALUES = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are data, in which there are no keywords."""


def is_endless(schema: object) -> bool:
    """Whether a `$ref` leads to itself through others alone. llguidance finds that in the middle of an answer."""
    left, seen = [schema], set[int]()
    while left:
        node: Any = left.pop()
        for key, value in node.items() if isinstance(node, dict) else ():
            if key not in VALUES:
                left.extend(value.values() if key in NAMED and isinstance(value, dict) else [value])
        left.extend(node if isinstance(node, list) else ())
        chain = set[int]()
        while isinstance(node, dict) and id(node) not in seen:
            seen.add(id(node))
            chain.add(id(node))
            node = _required(schema, node)
        if id(node) in chain:
            return True
    return False


def _required(schema: object, node: dict[str, Any]) -> object:
    """What every value of the schema `node` must match too: what it refers to, or its only choice; None: nothing."""
    for choices in map(node.get, ("anyOf", "oneOf", "allOf") if "$ref" not in node else ()):
        if isinstance(choices, list) and len(choices) == 1:
            return choices[0]
    return _referred(schema, node.get("$ref"))


def _referred(schema: Any, reference: object) -> object:
    """What a JSON pointer leads to (RFC 6901); None: nothing here."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in filter(None, reference[1:].split("/")):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = dict(enumerate(schema)).get(int(name)) if name.isdecimal() else None
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def path_of(schema: object, is_refused: Callable[[object], bool]) -> list[str]:
    """The path to the value that a refused JSON schema is refused for: without it and all that follows it, the schema
    is not. Definitions, to which others refer, count as the first. At each level of the path it tries as many schemas
    as a binary search.
    """
    children: list[tuple[Any, object]] = []
    if isinstance(schema, dict):
        children = sorted(schema.items(), key=lambda child: child[0] not in ("$defs", "definitions"))
    elif isinstance(schema, list):
        children = list(enumerate(schema))

    def first(count: int) -> object:
        return dict(children[:count]) if isinstance(schema, dict) else [child for _, child in children[:count]]

    def with_last(count: int, last: object) -> object:
        kept = first(count)
        return {**kept, children[count][0]: last} if isinstance(kept, dict) else [*kept, last]  # type: ignore[misc]

    if not children or is_refused(first(0)):
        return []
    at = bisect_left(range(len(children)), True, lo=1, key=lambda count: is_refused(first(count))) - 1
    name, child = children[at]
    return [str(name), *path_of(child, lambda changed: is_refused(with_last(at, changed)))]
