"""The server under load, looked at twice a second beside the turns."""

from __future__ import annotations

from loadgen.sampling.sampler import Sampler, sampling

__all__ = ["Sampler", "sampling"]
