"""The server under load, looked at twice a second beside the turns."""

from loadgen.sampling.sampler import Sampler, sampling

__all__ = ["Sampler", "sampling"]
