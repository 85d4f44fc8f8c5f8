"""What the CPU kernels of attention share: numbers, and how a score becomes a power of 2."""

from typing import Any

import numpy as np

from app.gpu.kernels.cpu.compile import exp2, inlined

LOG2_E = np.float32(1.4426950408889634)
LOWEST = np.float32(-3e38)
"""Of no key."""
LEAST_EXPONENT = np.float32(-126)
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)


@inlined
def query_scale(scale: Any, softcap: Any) -> Any:
    """What a query is multiplied by, so that `bounded` takes its scores."""
    return scale * LOG2_E if softcap == 0 else scale / softcap


@inlined
def bounded(score: Any, softcap: Any) -> Any:
    """`softcap * tanh(score)` as a power of 2, or the score as it is if there is no cap."""
    if softcap == 0:
        return score
    power = min(max(TWO * LOG2_E * score, LEAST_EXPONENT), -LEAST_EXPONENT)
    return softcap * LOG2_E * (ONE - TWO / (ONE + exp2(power)))
