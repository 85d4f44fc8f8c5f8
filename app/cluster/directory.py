"""Where things are whose names do not say it: an interface, and the keys of its table."""

from __future__ import annotations

from typing import Protocol


class Directory(Protocol):
    """Keys and the replicas that have them. Every method raises `DirectoryAway` if the directory does not answer."""

    async def find(self, key: str) -> str | None:
        """The replica of that key; None: unknown."""
        ...

    async def bind(self, key: str, replica: str) -> str:
        """The replica of that key: `replica` if there was no other entry before."""
        ...

    async def put(self, key: str, replica: str) -> None:
        """Have that replica for the key from now on."""
        ...


def session_key(session_id: str) -> str:
    """Of a session that is not where its id says."""
    return f"session {session_id}"


def response_key(response_id: str) -> str:
    """Of a response that is not where its id says."""
    return f"response {response_id}"


def name_key(owner: str | None, name: str) -> str:
    """Of the session that the owner's calls name by `X-Session-ID`."""
    return f"name {owner or ''} {name}"
