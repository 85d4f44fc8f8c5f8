"""What is wrong in a JSON schema, where the compiler of grammars does not say it: endless references, and the place.
And what says nothing in one.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

ENDLESS = "a $ref refers to itself, directly or through what each of its values must have: no value can match it"
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values have schemas by names."""
DEFINED = ("$defs.", "definitions.")
VALUES = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are data, in which there are no keywords."""
_SILENT: tuple[tuple[str, object], ...] = (
    ("propertyNames", {"type": "string"}),
    ("propertyNames", {}),
    ("uniqueItems", False),
)
Found = TypeVar("Found", list[Any], dict[str, Any], int)


def without_silent(schema: Any) -> Any:
    """A schema without keywords that say nothing, as zod writes one for records, and other clients null for none."""
    if isinstance(schema, list):
        return [without_silent(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    said = dict[str, Any]()
    for key, value in schema.items():
        if key == "const" or (value is not None and (key, value) not in _SILENT):
            is_named = key in NAMED and isinstance(value, dict)
            inner = {name: without_silent(each) for name, each in value.items()} if is_named else without_silent(value)
            said[key] = value if key in VALUES else inner
    return said


def endless_reference(schema: object) -> str | None:
    """The dotted path to a `$ref` that refers to itself, so that no finite value matches it; None: there is none.
    llguidance finds that in the middle of an answer, or never.

    A schema is finite once each of its `_needs` has a choice that is finite: this is the least fixed point.
    """
    needs = dict[int, dict[str, list[Any]]]()
    needed_by = defaultdict[int, list[tuple[int, str]]](list)
    names = dict[int, tuple[int, str]]()
    left: list[Any] = [schema]
    while left:
        node = left.pop()
        if id(node) in needs:
            continue
        needs[id(node)] = _needs(schema, node)
        for need, choices in needs[id(node)].items():
            left.extend(choices)
            for choice in choices:
                needed_by[id(choice)].append((id(node), need))
        for name, child in _children(node):
            names[id(child)] = id(node), name
            if not name.startswith(DEFINED):  # those that nothing refers to do no harm
                left.append(child)
    finite = [each for each, unmet in needs.items() if not unmet]
    while finite:
        for each, need in needed_by[finite.pop()]:
            if needs[each].pop(need, None) and not needs[each]:
                finite.append(each)
    at = next((each for each, unmet in needs.items() if unmet), None)
    if at is None:
        return None
    passed = set[int]()
    while at not in passed or "$ref" not in needs[at]:  # each needs another that is not finite: this ends in a loop
        passed.add(at)
        at = id(next(iter(needs[at].values()))[0])
    path = ["$ref"]
    while at in names:
        at, name = names[at]
        path.append(name)
    return ".".join(reversed(path))


def _children(node: object) -> Iterator[tuple[str, Any]]:
    """What is in a schema, or in a list in one, by its path."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if key in NAMED and isinstance(value, dict):
            yield from ((f"{key}.{name}", each) for name, each in value.items())
        elif key not in VALUES:
            yield key, value
    yield from ((str(index), each) for index, each in enumerate(node if isinstance(node, list) else ()))


def _needs(schema: object, node: Any) -> dict[str, list[Any]]:
    """What each value of the schema `node` needs: by keyword, `$ref` first, schemas of which one must have a value.
    It reads each keyword by itself: what choices require of the properties beside them, it does not see.
    """

    def found(key: str, kind: type[Found]) -> Found:
        value = node.get(key)
        return value if isinstance(value, kind) else kind()

    if not isinstance(node, dict):
        return {}
    target = referred(schema, node.get("$ref"))
    needs = {"$ref": [] if target is None else [target], "anyOf": found("anyOf", list), "oneOf": found("oneOf", list)}
    needs |= {f"allOf {index}": [each] for index, each in enumerate(found("allOf", list))}
    if node.get("type") in ("object", ["object"]):
        named = found("properties", dict)
        others = [node.get("additionalProperties", True), *found("patternProperties", dict).values()]
        required = {name for name in found("required", list) if isinstance(name, str)}
        needs |= {f"required {name}": [named[name]] for name in named if name in required}
        needs["required"] = others if required.difference(named) else []
        needs["minProperties"] = [*named.values(), *others] if found("minProperties", int) > 0 else []
    elif node.get("type") in ("array", ["array"]):
        first = found("prefixItems", list) or found("items", list)
        items = [*first, node.get("additionalItems" if found("items", list) else "items", True)]
        needs |= {f"minItems {index}": [each] for index, each in enumerate(items[: max(found("minItems", int), 0)])}
    return {need: choices for need, choices in needs.items() if choices}


def referred(schema: Any, reference: object) -> object:
    """What a JSON pointer leads to (RFC 6901); None: nothing here."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in filter(None, reference[1:].split("/")):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(name)] if name.isdecimal() and int(name) < len(schema) else None
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
