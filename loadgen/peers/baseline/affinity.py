"""Which worker knows a conversation, told by its tokens: its history is the beginning of its next prompt."""

from __future__ import annotations

from collections import Counter


class Affinity:
    """Remembers every conversation's worker, of which there are `workers`."""

    def __init__(self, workers: int) -> None:
        self._workers = range(workers)
        self._histories: dict[tuple[int, ...], int] = {}

    def worker(self, prompt: tuple[int, ...]) -> int:
        """The worker of the conversation that `prompt` goes on with; for a new one, that with the fewest of them."""
        known = [history for history in self._histories if prompt[: len(history)] == history]
        if known:
            return self._histories.pop(max(known, key=len))
        conversations = Counter(self._histories.values())
        return min(self._workers, key=lambda worker: conversations[worker])

    def remember(self, history: tuple[int, ...], worker: int) -> None:
        """A conversation's tokens so far, once its turn is over."""
        self._histories[history] = worker
