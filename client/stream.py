"""From the events of one turn to tokens, and at the end to the turn. Nothing here does I/O."""

from httpx_sse import ServerSentEvent
from pydantic import ValidationError

from client.errors import InvalidAnswer, StreamBroken, error_from_event
from client.models import TokenEvent, Turn


class TurnDecoder:
    """Fed the events of one turn in order, gives its tokens; `turn` is there after the last one, which says that the
    turn is over or that it is paused.

    Events with a name that is not known are passed over, as the SSE standard has it.
    """

    def __init__(self, request_id: str | None) -> None:
        self._request_id = request_id
        self._turn: Turn | None = None
        self.is_over = False
        """Whether nothing more of the turn comes: it has ended, failed or paused."""

    @property
    def turn(self) -> Turn:
        """The turn so far, or whole. Raises `RuntimeError` while it runs."""
        if self._turn is None:
            raise RuntimeError("the turn is not over: read its events to the end first")
        return self._turn

    def feed(self, event: ServerSentEvent) -> TokenEvent | None:
        """Take one event; returns the tokens in it, if any. Raises the error that an `error` event stands for."""
        if event.event == "error":
            self.is_over = True
            raise error_from_event(event.data, request_id=self._request_id)
        try:
            if event.event == "token":
                return TokenEvent.model_validate_json(event.data)
            if event.event in ("finished", "paused"):
                self._turn = Turn.model_validate_json(event.data)
                self.is_over = True
        except ValidationError as error:
            message = f"the data of a {event.event} event is not what Djinn sends: {error}"
            raise InvalidAnswer(message, request_id=self._request_id) from error
        return None

    def end(self) -> None:
        """The stream is over. Raises `StreamBroken` if the turn is neither over nor paused."""
        if self._turn is None:
            raise StreamBroken("the stream ended before the turn did", request_id=self._request_id)
