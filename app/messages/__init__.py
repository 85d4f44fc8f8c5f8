"""Messages between the event loop and the engine thread: commands in, events out.

Every command is answered by exactly one terminal event that carries its ticket: `TurnFinished` or `Paused` for a
`Submit` or a `Resume`, `Done` for any other, `Failed` for either. `Started` and `Token` may come before the end of a
turn. A turn that is cancelled while it is paused ends once more, with `TurnFinished`, under the ticket that it was
paused under. Nothing is dropped in silence.
"""

from app.messages.answers import ExportedKV, ImportedKV, KeptKV, ReceivedKV, ReceivedPrompt, SentKV
from app.messages.checkpoint_commands import (
    Arm,
    BreakpointCommand,
    CheckpointCommand,
    ClearCaptures,
    CloseMap,
    Disarm,
    EditCheckpoint,
    Lens,
    MapLens,
    OpenMap,
    ReadCaptures,
    ReadCheckpoint,
    ReadNorms,
    ReadPaused,
    Reinstate,
    WriteCheckpoint,
)
from app.messages.events import (
    Back,
    Done,
    Event,
    Failed,
    Lacking,
    Lost,
    Notice,
    Paused,
    Placed,
    PromptScored,
    Replacement,
    Spent,
    Started,
    Token,
    TurnEvent,
    TurnFinished,
)
from app.messages.prompt_commands import ComputePrompt, PromptCommand, ReceivePrompt, SendPrompt
from app.messages.server_commands import FreeDisk, Inspect, KeepKV, Restored
from app.messages.session_commands import (
    Close,
    Export,
    Fork,
    FreeHost,
    Import,
    Open,
    PublishKV,
    ReceiveKV,
    Rewind,
    SendKV,
    SessionCommand,
    SetPhase,
)
from app.messages.turn_commands import Cancel, Resume, Submit, TurnCommand

Command = (
    TurnCommand
    | SessionCommand
    | BreakpointCommand
    | CheckpointCommand
    | PromptCommand
    | Restored
    | Inspect
    | FreeDisk
    | KeepKV
)

__all__ = [
    "Arm",
    "Back",
    "BreakpointCommand",
    "Cancel",
    "CheckpointCommand",
    "ClearCaptures",
    "Close",
    "CloseMap",
    "Command",
    "ComputePrompt",
    "Disarm",
    "Done",
    "EditCheckpoint",
    "Event",
    "Export",
    "ExportedKV",
    "Failed",
    "Fork",
    "FreeDisk",
    "FreeHost",
    "Import",
    "ImportedKV",
    "Inspect",
    "KeepKV",
    "KeptKV",
    "Lacking",
    "Lens",
    "Lost",
    "MapLens",
    "Notice",
    "Open",
    "OpenMap",
    "Paused",
    "Placed",
    "PromptCommand",
    "PromptScored",
    "PublishKV",
    "ReadCaptures",
    "ReadCheckpoint",
    "ReadNorms",
    "ReadPaused",
    "ReceiveKV",
    "ReceivePrompt",
    "ReceivedKV",
    "ReceivedPrompt",
    "Reinstate",
    "Replacement",
    "Restored",
    "Resume",
    "Rewind",
    "SendKV",
    "SendPrompt",
    "SentKV",
    "SessionCommand",
    "SetPhase",
    "Spent",
    "Started",
    "Submit",
    "Token",
    "TurnCommand",
    "TurnEvent",
    "TurnFinished",
    "WriteCheckpoint",
]
