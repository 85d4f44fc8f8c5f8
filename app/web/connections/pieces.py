"""Small pieces of bodies and messages: each costs the server as much as a large one, so their number has a bound."""

FULL_BYTES = 256
"""A piece of so many bytes is not small: to take its content costs as much as to find its ends."""
BURST = 1024
"""Empty pieces that may come at once: they hold up all others for about 10 ms."""
PER_S = 256.0
"""Empty pieces that may come each second for ever."""


class SmallPieces:
    """Counts the small pieces of one connection. A piece counts for the part of `FULL_BYTES` that it lacks."""

    def __init__(self) -> None:
        self._count = 0.0
        self._counted_at = 0.0

    def take(self, size: int, now: float) -> bool:
        """Count a piece of `size` bytes at `now`, in s of a monotonic clock. False if there are too many."""
        passed = (now - self._counted_at) * PER_S
        self._count = max(0.0, self._count - passed) + max(0.0, 1 - size / FULL_BYTES)
        self._counted_at = now
        return self._count <= BURST
