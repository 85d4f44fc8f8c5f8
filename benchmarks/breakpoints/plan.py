"""How much is measured, and of what."""

from dataclasses import dataclass

DTYPE = "float32"
SETTINGS = {"dtype": DTYPE, "kv_device": "256MiB"}
PROMPT_TOKENS = 64
PREFILL_TOKENS = 512
BUSY_SESSIONS = 16
WIDTHS = (1, BUSY_SESSIONS)
"""How many sessions decode at once."""
KINDS = ("plain", "beside_paused", "unmatched", "steered")
"""Of those that `DecodeBench` knows."""


@dataclass(frozen=True, slots=True)
class Plan:
    """decode_pauses, prefill_pauses: in all; decode_rounds: of each width, in each of which every kind of turn has
    `decode_steps` steps.
    """

    decode_pauses: int
    prefill_pauses: int
    decode_rounds: int
    decode_steps: int


FULL = Plan(decode_pauses=400, prefill_pauses=200, decode_rounds=40, decode_steps=16)
QUICK = Plan(decode_pauses=20, prefill_pauses=10, decode_rounds=3, decode_steps=6)
