"""What one turn costs, from the moment that a call is let in to the turn's end."""

from collections.abc import Callable

from app.domain.limits import Settle
from app.domain.values import TurnUsage
from app.messages import Failed, Started, TurnEvent, TurnFinished


class TurnCharge:
    """What one turn costs its owner: the tokens that it brings and that have no KV yet, and those that it generates."""

    def __init__(
        self, settle: Settle, *, sent: int, generated: int = 0, give_back: Callable[[], None] = lambda: None
    ) -> None:
        """`sent` tokens come with the turn, or are left of it. It has `generated` some already, in the session that it
        was copied from. `give_back` is called once the turn has ended and the call that began it is answered.
        """
        self._settle = settle
        self._sent = sent
        self._generated = generated
        self._give_back = give_back
        self._has_run = False
        self._is_settled = False
        self._is_answered = False

    @property
    def uncounted(self) -> int:
        """Tokens that the turn left to its session's next one: it ended before it ran."""
        return 0 if self._has_run else self._sent

    def observe(self, event: TurnEvent) -> None:
        """Settle with the turn's end. One that failed, or never left the queue, costs nothing itself."""
        self._has_run |= isinstance(event, Started)
        if isinstance(event, TurnFinished):
            self._settle_once(self._cost(event.usage))
        elif isinstance(event, Failed):
            self.drop()

    def drop(self) -> None:
        """Give everything back: the turn has not begun, or has failed."""
        self._settle_once(0)

    def answered(self) -> None:
        """The call that began the turn, or was to, is over."""
        self._is_answered = True
        if self._is_settled:
            self._give_back()

    def _settle_once(self, used: int) -> None:
        # A copy that its client no longer waits for is dropped, and ends all the same.
        if not self._is_settled:
            self._is_settled = True
            self._settle(used)
            if self._is_answered:
                self._give_back()

    def _cost(self, usage: TurnUsage) -> int:
        # What the server has dropped and recomputes is not the owner's.
        sent = min(self._sent, usage.prompt_tokens - usage.cached_tokens) if self._has_run else 0
        return sent + usage.completion_tokens - self._generated
