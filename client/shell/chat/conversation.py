"""A conversation: the session that it is in, and its turns."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

from client._sync.client import Djinn
from client._sync.session import Session
from client._sync.turn import TurnStream
from client.breakpoint_models import CheckpointInfo
from client.calls import TurnOptions
from client.edits import Until
from client.errors import DjinnError
from client.shell.chat.interrupts import ctrl_c_cancels
from client.shell.chat.terminal import Terminal
from client.shell.chat.views import Thoughts, end_of_turn, place_of

LABELS = {"name": "chat"}
LONGEST_REPLY = 2048
"""Tokens of an answer, unless the user says: a small model may never stop by itself."""
TEMPLATE_TOKENS = 512
"""At most, of the chat template around the first line."""


class Misuse(Exception):
    """A line that asks for nothing that there is; the message says so."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a conversation goes: whether lines are sent as they are, without the chat template, whether its sessions stay
    open, and how turns sample.
    """

    raw: bool
    keep: bool
    sampling: TurnOptions


class Conversation:
    """What the user is in. `session` is the current one; those that it opened are closed at the end."""

    def __init__(self, djinn: Djinn, terminal: Terminal, manner: Manner, session: str | None) -> None:
        self._djinn = djinn
        self._opened: list[Session] = []
        self._manner = manner
        self.terminal = terminal
        if session is None:
            self.session = djinn.sessions.create(metadata=LABELS)
            self._opened.append(self.session)
        else:
            self.session = self.find(session)

    @property
    def checkpoint(self) -> CheckpointInfo | None:
        """Where the session is paused, as far as is known."""
        return self.session.info.checkpoint

    @property
    def layers(self) -> int:
        """How many the model has."""
        return self._djinn.models()[0].layers

    def find(self, given: str) -> Session:
        """The session with this id, or whose id alone ends like this. Raises `NotFound` or `Misuse`."""
        if given.startswith("ses_"):
            return self._djinn.sessions.get(given)
        end = given.removeprefix("…")
        found = [session for session in self._djinn.sessions.list() if session.id.endswith(end)]
        if len(found) != 1:
            raise Misuse(f"the ids of {len(found) or 'no'} sessions end with {end}")
        return found[0]

    def say(self, line: str) -> None:
        """Run a turn with the user's line."""
        turn = self._manner.sampling.copy()
        if self._manner.raw:
            turn["prompt"] = line
        else:
            turn["messages"] = [{"role": "user", "content": line}]
        room = self._djinn.models()[0].max_model_len - self.session.info.tokens - len(line.encode()) - TEMPLATE_TOKENS
        if room > LONGEST_REPLY:  # else the server's default, all that is left, is less
            turn.setdefault("max_tokens", LONGEST_REPLY)
        self._follow(self.session.stream(**turn))

    def resume(self, until: Until | None) -> None:
        """Go on with the paused turn."""
        self._follow(self.session.resume_stream(until=until))

    def fork(self) -> Session:
        """Go on in a copy of the session. Returns the one that was left."""
        left, self.session = self.session, self.session.fork()
        self._opened.append(self.session)
        return left

    def close(self) -> None:
        """Close what the conversation opened, or say what stays."""
        for session in self._opened:
            if self._manner.keep:
                self.terminal.note(f"kept {session.id}")
                continue
            try:
                session.close()
            except DjinnError as error:
                self.terminal.complain(f"could not close {session.id}: {error.message}")

    def _follow(self, opened: AbstractContextManager[TurnStream]) -> None:
        """Show a turn as it runs, to its end or its next pause. Ctrl-C cancels it."""
        thoughts = Thoughts()
        try:
            with ctrl_c_cancels(self.session), opened as stream:
                for event in stream:
                    parts = thoughts.split(event.text) if self.terminal.is_interactive else [(event.text, False)]
                    for text, is_thought in parts:
                        self.terminal.stream(text, is_thought=is_thought)
        finally:
            text, is_thought = thoughts.end()
            self.terminal.stream(text, is_thought=is_thought)
            self.terminal.end_line()
        turn = stream.turn
        self.session.refresh()
        self.terminal.note(end_of_turn(turn) if turn.checkpoint is None else place_of(turn.checkpoint))
