"""Attacks by text: long ones, deep ones, and grammars that explode."""

import itertools
import json

from benchmarks.fairness.attacks.base import Attack, Target, again_and_again

TEXT_BYTES = 8_000_000
MOST_IDS = 131_072


async def long_texts(target: Target) -> None:
    text = json.dumps({"prompt": "word " * (TEXT_BYTES // 5)}).encode()
    ids = json.dumps({"tokens": target.token_ids(1) * MOST_IDS}).encode()
    bodies = itertools.cycle((("/tokenize", text), ("/detokenize", ids)))

    async def send() -> None:
        path, body = next(bodies)
        await target.request("POST", path, content=body, headers={"content-type": "application/json"})

    await again_and_again(target, 4, send)


def _bombs() -> list[dict[str, object]]:
    deep: dict[str, object] = {"type": "string"}
    for number in range(10):
        deep = {"type": "object", "properties": {f"a{number}": deep, "b": deep}, "additionalProperties": False}
    wide = {f"key{number}": {"type": "integer"} for number in range(2000)}
    many = [f"{number:032x}" for number in range(1000)]
    return [
        {"regex": "(a|aa|aaa)*(b|bb)*" * 40},
        {"regex": "((a?){200}a{200}){20}"},
        {"regex": "[a-z]{1,1000}[0-9]{1,1000}x"},
        {"json": {"type": "object", "properties": wide, "required": list(wide)}},
        {"json": {"enum": many}},
        {"json": {"type": "array", "items": {"anyOf": [{"const": each} for each in many]}, "maxItems": 1000}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}},
        {"json": deep},
        {"json": {"type": "string", "pattern": "(x+x+)+y"}},
    ]


async def grammar_bombs(target: Target) -> None:
    bombs, numbers = _bombs(), itertools.count()

    async def send() -> None:
        number = next(numbers)
        bomb = {**bombs[number % len(bombs)]}
        if "regex" in bomb:  # another text each time, so that none is known already
            bomb["regex"] = f"{bomb['regex']}z{{0,{number % 900 + 1}}}"
        await target.alone(8, 32, structured_outputs=bomb)

    await again_and_again(target, 8, send)


async def deep_bodies(target: Target) -> None:
    bodies = itertools.cycle(
        (
            b"[" * 4_000_000,
            b'{"metadata":' * 90 + b"{}" + b"}" * 90,
            b'{"token_ids":[' + b"1," * 2_000_000 + b"1]}",
            b'{"max_tokens":' + b"9" * 7_000_000 + b"}",
            b'{"' + b"k" * 7_000_000 + b'":1}',
            b"{" + b",".join(b'"k%d":1' % number for number in range(400_000)) + b"}",
        )
    )
    session = await target.open()

    async def send() -> None:
        headers = {"content-type": "application/json"}
        await target.request("POST", f"{session}/generate", content=next(bodies), headers=headers)

    await again_and_again(target, 4, send)


ATTACKS = (
    Attack("long-texts", "4 at once have 8 MB tokenized and 131,072 tokens made text", long_texts),
    Attack("grammar-bombs", "8 at once send regular expressions and schemas that explode", grammar_bombs),
    Attack("json-bombs", "4 at once send bodies of megabytes: deep, wide, with endless numbers", deep_bodies),
)
