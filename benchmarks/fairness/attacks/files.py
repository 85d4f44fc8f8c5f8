"""Attacks by files: exports, imports, vectors."""

import struct

import numpy as np
from safetensors.numpy import save

from benchmarks.fairness.attacks.base import Attack, Target, again_and_again

FILE = {"content-type": "application/octet-stream"}
HISTORY = 800
HOSTILE_SIZES = (0, 1, 2**31, 2**53, 2**63 - 1, 2**64 - 1)


async def _long_session(target: Target) -> str:
    session = await target.open()
    await target.turn(session, min(HISTORY, target.model.context - 16), 1)
    return session


async def exports(target: Target) -> None:
    session = await _long_session(target)
    await again_and_again(target, 8, lambda: target.request("GET", f"{session}/export"))


async def damaged_imports(target: Target) -> None:
    session = await _long_session(target)
    whole = (await target.request("GET", f"{session}/export")).content

    async def damage() -> None:
        file = bytearray(whole)
        if target.chance.random() < 0.5:  # the header's own length
            file[:8] = struct.pack("<Q", target.chance.choice(HOSTILE_SIZES))
        for _ in range(target.chance.randint(1, 64)):
            file[target.chance.randrange(len(file))] ^= 1 << target.chance.randrange(8)
        await target.request("POST", "/v1/sessions/import", content=bytes(file), headers=FILE)

    await again_and_again(target, 8, damage)


async def vectors(target: Target) -> None:
    async def upload() -> None:
        name = f"v{target.chance.randrange(1 << 30)}"
        content = save({"vector": np.asarray(target.vector(), np.float32)})
        await target.request("POST", "/v1/vectors", params={"name": name}, content=content, headers=FILE)
        await target.request("GET", "/v1/vectors")

    await again_and_again(target, 8, upload)


ATTACKS = (
    Attack("exports", "8 at once export a session of 800 tokens again and again", exports),
    Attack("damaged-imports", "8 at once import files with flipped bits and hostile sizes", damaged_imports),
    Attack("vectors", "8 at once upload vectors under new names and list them all", vectors),
)
