"""How much is measured, and of what."""

import json
from dataclasses import dataclass
from pathlib import Path

from app.gpu.state.kv_header import KVLayout
from benchmarks.kv.bandwidth import CopyPlan

DTYPE = "float32"
BLOCK_TOKENS = 16
SESSION_TOKENS = 1024
HISTORY_TOKENS = 1000
GROWTH_TOKENS = 64
DEVICE_TOKENS = 1152
"""What the server's device tier holds: one session, so that a second one passing through leaves nothing of it there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """copies: of one session's KV; resume_rounds: turns of each kind; parks: sessions parked twice; signals: sent."""

    copies: CopyPlan
    resume_rounds: int
    parks: int
    signals: int


FULL = Plan(CopyPlan(allocations=10, rounds=10), resume_rounds=50, parks=3, signals=300)
QUICK = Plan(CopyPlan(allocations=2, rounds=5), resume_rounds=6, parks=1, signals=40)


def read_layout(model: Path) -> KVLayout:
    """The shape of one KV block of the model in this folder."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    return KVLayout(
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads", heads),
        block_size=BLOCK_TOKENS,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        dtype=DTYPE,
    )
