"""What an application has answered, for those who write of a request when it is over."""

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Message, Send

from app.web.request_id import ANSWERS, SESSION_HEADER

SWITCHING_PROTOCOLS, INTERNAL_ERROR = 101, 500
"""The status of an answer that names none: a WebSocket's, and that of a bug before the first header."""


@dataclass(slots=True)
class Answer:
    """Its `status`, and the `session` that it named: empty if it named none."""

    status: int = INTERNAL_ERROR
    session: str = ""

    def watched(self, send: Send) -> Send:
        """The same as `send`, with a look at the answer's beginning."""

        async def send_watched(message: Message) -> None:
            if message["type"] in ANSWERS:
                self.status = message.get("status", SWITCHING_PROTOCOLS)
                self.session = Headers(raw=message.get("headers", [])).get(SESSION_HEADER, "")
            await send(message)

        return send_watched
