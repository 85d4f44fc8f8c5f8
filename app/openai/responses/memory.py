"""The conversation of a connection, or of a call, that is not stored."""

from app.openai.responses.conversation import Conversation, StoredResponse
from app.sessions.registry import SessionRegistry


class UnstoredConversation:
    """Remembers one conversation at most, the last. Used on the event loop only."""

    def __init__(self, registry: SessionRegistry) -> None:
        self._registry = registry
        self._last: Conversation | None = None

    def find(self, response_id: str) -> StoredResponse | None:
        """The response of that id, if it belongs to the conversation."""
        return None if self._last is None else self._last.responses.get(response_id)

    def take(self, conversation: Conversation) -> None:
        """Remember another conversation in place of the one before, whose session closes."""
        if conversation is not self._last:
            self.close()
            self._last = conversation

    def close(self) -> None:
        """Forget the conversation. A session that was opened for it closes."""
        last, self._last = self._last, None
        if last is not None and last.owns_session and self._registry.table.find(last.session.id) is last.session:
            self._registry.drop(last.session)
