"""Forms in the OpenAPI document that generators of clients warn of, or write no code for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest


@pytest.fixture(scope="module")
def components(server_url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server_url}/openapi.json", timeout=30).json()["components"]["schemas"]
    return found


def objects(node: Any) -> Iterator[dict[str, Any]]:
    """Every object in `node`."""
    if isinstance(node, dict):
        yield node
    if isinstance(node, dict | list):
        for each in node.values() if isinstance(node, dict) else node:
            yield from objects(each)


def resolve(schema: dict[str, Any], components: dict[str, Any]) -> Any:
    return components[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def test_the_members_of_a_union_require_the_field_that_tells_them_apart(components: dict[str, Any]) -> None:
    tagged = [schema for schema in objects(components) if "discriminator" in schema]
    assert len(tagged) >= 10
    for schema in tagged:
        for member in schema["oneOf"]:
            assert schema["discriminator"]["propertyName"] in resolve(member, components)["required"]


def test_no_one_of_has_a_list_of_unions(components: dict[str, Any]) -> None:
    lists = [
        resolve(member["items"], components)
        for schema in objects(components)
        for member in schema.get("oneOf", ())
        if member.get("type") == "array"
    ]
    assert lists
    assert [items for items in lists if "oneOf" in items or "anyOf" in items] == []


def test_every_union_in_a_list_has_a_name(components: dict[str, Any]) -> None:
    lists = [schema["items"] for schema in objects(components) if schema.get("type") == "array"]
    assert [items for items in lists if "oneOf" in items] == []


def test_no_union_has_an_object_as_its_default(components: dict[str, Any]) -> None:
    assert [
        schema for schema in objects(components) if isinstance(schema.get("default"), dict) and "anyOf" in schema
    ] == []
