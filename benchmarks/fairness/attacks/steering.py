"""Attacks by breakpoints: work in everybody's step, or in the journal."""

from typing import Any

from benchmarks.fairness.attacks.base import Attack, Refused, Target, again_and_again

PROMPT = 450


def _sizes(layers: int) -> list[tuple[int, int, int]]:
    """Edits, layers and every how many positions: the most work first."""
    return [
        (edits, min(count, layers), every) for edits, count, every in ((16, 16, 2), (16, 4, 2), (16, 1, 2), (4, 1, 8))
    ]


async def many_edits(target: Target) -> None:
    async def steer() -> None:
        session = await target.open()
        try:
            for edits, layers, every in _sizes(target.model.layers):
                body = {
                    "layers": list(range(layers)),
                    "action": "edit",
                    "when": {"every": every},
                    "edits": [{"op": "add", "vector": target.vector()} for _ in range(edits)],
                }
                if await target.post(f"{session}/breakpoints", body):
                    break
            await target.turn(session, min(PROMPT, target.model.context // 2), 4)
        finally:
            await target.request("DELETE", session)

    await again_and_again(target, 4, steer)


async def growing_journal(target: Target) -> None:
    async def steer_anew() -> None:
        session = await target.open()
        for _ in range(20):
            edits = [{"op": "add", "vector": target.vector()} for _ in range(8)]
            if not await target.post(f"{session}/breakpoints", {"layer": 1, "action": "edit", "edits": edits}):
                raise Refused
            await target.turn(session, 8, 4)
            await target.request("DELETE", f"{session}/breakpoints")

    await again_and_again(target, 8, steer_anew)


async def lens_at_every_token(target: Target) -> None:
    async def look() -> None:
        session = await target.open()
        layer = {"layer": target.model.layers // 2, "action": "pause"}
        await target.post(f"{session}/breakpoints", layer)
        answer: Any = await target.turn(session, 64, 32)
        while answer.get("status") == "paused":
            await target.request("GET", f"{session}/checkpoint/lens", params={"top_k": 20})
            await target.request("GET", f"{session}/checkpoint/activation")
            answer = await target.post(f"{session}/resume", {"until": "next_token"})
        await target.request("DELETE", session)

    await again_and_again(target, 8, look)


async def captures(target: Target) -> None:
    async def record() -> None:
        session = await target.open()
        await target.post(f"{session}/breakpoints", {"layers": list(range(target.model.layers)), "action": "capture"})
        await target.turn(session, min(PROMPT, target.model.context // 2), 4)
        await target.request("GET", f"{session}/captures")
        await target.request("DELETE", session)

    await again_and_again(target, 4, record)


ATTACKS = (
    Attack("breakpoint-work", "16 edits after as many layers as are allowed, at every second position", many_edits),
    Attack("intervention-journal", "new vectors in every turn, which the journal has to keep", growing_journal),
    Attack(
        "lens", "8 at once pause in every token, read it through the lens and read its activation", lens_at_every_token
    ),
    Attack("captures", "4 at once capture all layers of 450 tokens and read them", captures),
)
