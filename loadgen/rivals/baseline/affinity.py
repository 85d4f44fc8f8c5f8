"""Which worker knows a conversation, told by its tokens: its history is the beginning of its next prompt."""

from collections import Counter


class Affinity:
    """Remembers every conversation's worker, of which there are `workers`."""

    def __init__(self, workers: int) -> None:
        self._workers = range(workers)
        self._histories: dict[tuple[int, ...], int] = {}
        self._under_way: Counter[int] = Counter()

    def begin(self, prompt: tuple[int, ...]) -> int:
        """The worker of the conversation that `prompt` goes on with; for a new one, that with the fewest of them, turns
        under way included.
        """
        known = [history for history in self._histories if prompt[: len(history)] == history]
        worker = self._histories.pop(max(known, key=len)) if known else self._least_asked()
        self._under_way[worker] += 1
        return worker

    def end(self, worker: int, history: tuple[int, ...] | None) -> None:
        """A turn is over. `history`: the conversation's tokens so far; None if it failed: it is then forgotten."""
        self._under_way[worker] -= 1
        if history is not None:
            self._histories[history] = worker

    def _least_asked(self) -> int:
        waiting = Counter(self._histories.values())
        return min(self._workers, key=lambda worker: waiting[worker] + self._under_way[worker])
