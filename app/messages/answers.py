"""Values that a `Done` carries."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExportedKV:
    """An export has been written: tokens of the history, and how many of them have their KV in the file."""

    tokens: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class ImportedKV:
    """An import has been read: the history, and where in the file the `about` of the export is, in bytes."""

    token_ids: tuple[int, ...]
    about_at: int
    about_bytes: int


@dataclass(frozen=True, slots=True)
class KeptKV:
    """`sessions` have their KV on disk, that of `tokens` tokens; `lost` others have some which is not there."""

    sessions: int
    tokens: int
    lost: int
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class SentKV:
    """A session's history of `tokens` has been sent, with the KV of the first `computed_tokens`, in so many bytes."""

    tokens: int
    computed_tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ReceivedPrompt:
    """KV of `tokens` tokens of a prompt has come from another server; `error` says why not that of all."""

    tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ReceivedKV:
    """A session has come, with the KV of its first `computed_tokens`."""

    computed_tokens: int
