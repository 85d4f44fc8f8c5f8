"""Commands about prompts that one server computes for another."""

from dataclasses import dataclass

from app.domain.values import SessionId, Ticket


@dataclass(frozen=True, slots=True)
class ReceivePrompt:
    """Have the turn, of which `Lacking` has told, wait for KV of its prompt: blocks from number `first` on, which
    `SendPrompt` of another server's engine sends over the connection. Answered by `Done(ReceivedPrompt)` when nothing
    more comes; then the turn goes on with what has come.

    Fails as `PeerFull` if host memory has no room for them, and then the turn goes on without; as `WrongState` if it
    waits no more.
    """

    ticket: Ticket
    session: SessionId
    turn: Ticket
    connection: int
    first: int


@dataclass(frozen=True, slots=True)
class ComputePrompt:
    """Have the turn of a `Lacking` event go on: no other replica computes its prompt. Answered by `Done(None)`, also if
    it waits no more.
    """

    ticket: Ticket
    session: SessionId
    turn: Ticket


@dataclass(frozen=True, slots=True)
class SendPrompt:
    """Send the blocks of the session, from number `first` on, over the connection of that number, as they are computed
    by its turn, which generates nothing. Answered by `Done(SentKV)` when the last of them has been written to the
    connection.

    Fails as `EngineError` if the turn ends before it has them all, or the other server wants them no more.
    """

    ticket: Ticket
    session: SessionId
    connection: int
    first: int


PromptCommand = ReceivePrompt | ComputePrompt | SendPrompt
