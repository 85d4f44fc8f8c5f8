"""`djinn chat`: lines in, answers out."""

from client._sync.client import Djinn
from client.calls import TurnOptions
from client.edge import DEFAULT_TIMEOUT_S, address_of
from client.errors import APIError, DjinnError, NotFound
from client.shell.chat.commands import obey
from client.shell.chat.conversation import Conversation, Manner, Misuse
from client.shell.chat.terminal import Terminal
from client.shell.ending import ended_in_order
from client.shell.server import FAILED, explain, on_server


def chat(url: str | None, *, session: str | None, keep: bool, raw: bool, sampling: TurnOptions) -> int:
    """Talk in a new session of the server at `url`, or in `session`, which stays open.

    `keep`: the new session stays open too. `raw`: lines are prompts, without the chat template. Returns the exit
    status: 1 if the session is gone, or, without a terminal, after the first mistake.
    """
    address = address_of(url or None)

    def command(djinn: Djinn) -> int:
        terminal = Terminal()
        with ended_in_order():
            try:
                conversation = Conversation(djinn, terminal, Manner(raw, keep, sampling), session)
            except Misuse as error:
                terminal.complain(str(error))
                return FAILED
            terminal.note(f"session {conversation.session.id} on {address}; /help lists commands")
            try:
                return _Talk(conversation, terminal, address).run()
            finally:
                conversation.close()

    return on_server(url, command, timeout=DEFAULT_TIMEOUT_S)


class _Talk:
    """From one line to the next."""

    def __init__(self, conversation: Conversation, terminal: Terminal, address: str) -> None:
        self._conversation = conversation
        self._terminal = terminal
        self._address = address

    def run(self) -> int:
        """To the last line; returns the exit status."""
        while True:
            try:
                line = self._terminal.ask(self._prompt())
                if line is None:
                    return 0
                self._take(line)
            except EOFError:
                return 0
            except KeyboardInterrupt:
                self._terminal.note("\n(/quit or Ctrl-D ends the conversation)")
            except (Misuse, DjinnError) as error:
                if not self._goes_on_after(error):
                    return FAILED

    def _prompt(self) -> str:
        checkpoint = self._conversation.checkpoint
        return "> " if checkpoint is None else f"layer {checkpoint.layer}> "

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            obey(self._conversation, line)
        elif line.strip():
            self._conversation.say(line)

    def _goes_on_after(self, error: Misuse | DjinnError) -> bool:
        """Say what went wrong. The conversation ends without a terminal, and with its session."""
        if isinstance(error, Misuse):
            self._terminal.complain(str(error))
        else:
            self._terminal.complain(explain(error, self._address))
        return self._terminal.is_interactive and not (isinstance(error, APIError) and self._is_gone())

    def _is_gone(self) -> bool:
        """Whether the session has ended. Otherwise its state is known anew."""
        try:
            self._conversation.session.refresh()
        except NotFound:
            return True
        except DjinnError:  # it may come back with its server
            pass
        return False
