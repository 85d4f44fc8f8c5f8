"""What prompts have of a step, as `app.gpu.planning` gives it to those of a single tenant."""

from __future__ import annotations

from loadgen.experiments.simulate.world.session import Turn

AGING_STEPS = 8
"""In so many steps that pass over a turn it comes nearer by the prompts of one step."""


def in_order(claims: list[Turn], shared_tokens: int) -> list[Turn]:
    """The nearest to its next token first. `shared_tokens` are those of prompts in a step that turns share."""
    part = max(1, shared_tokens // AGING_STEPS)
    return sorted(claims, key=lambda turn: turn.pending - turn.passed_over * part)


def share(chosen: list[Turn], most: int) -> list[tuple[Turn, int]]:
    """Tokens of each in one step of `most`. The first leaves half to shorter ones, and takes all that they leave."""
    if not chosen:
        return []
    owed = 0
    if chosen[0].pending > min(turn.pending for turn in chosen):
        owed = min(chosen[0].pending, -(-most // 2))
        chosen = [*chosen[1:], chosen[0]]
    shares, spent = list[tuple[Turn, int]](), 0
    for turn in chosen:
        left = most - spent - (0 if turn is chosen[-1] else owed)
        if left > 0:
            tokens = min(turn.pending, left)
            shares.append((turn, tokens))
            spent += tokens
    return shares
