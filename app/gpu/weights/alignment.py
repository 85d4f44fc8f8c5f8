"""Where in memory and in files a bundle, a tensor of one, or a table may begin."""

ALIGNMENT = 256
"""Bytes: enough for every vector load of a CPU or GPU, and a divisor of a page, which direct reads need."""


def aligned(nbytes: int) -> int:
    """The smallest multiple of `ALIGNMENT` that is not less than `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
