"""The cluster's store: keys and values that all replicas see alike, in etcd or in a file of one machine.

It has three kinds of keys:

- `fleet/member/NAME` is what a replica says of itself. It goes when the replica says nothing for some seconds.
- `fleet/journal/NAME` says which journal the name belongs to, and how often that was started; `fleet/tombstone/UUID`
  is a journal that has been given up.
- `place/KEY` is the replica that has a session, a response or a name. The first one to write it wins.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

FLEET, PLACE = "fleet/", "place/"
MEMBER, JOURNAL, TOMB = f"{FLEET}member/", f"{FLEET}journal/", f"{FLEET}tombstone/"


class Store(Protocol):
    """One replica's view of the store. Every method raises `DirectoryAway` if the store does not answer."""

    shown: str
    """Its address, without a password."""

    async def read(self, key: str) -> str | None:
        """The value; None: there is none."""
        ...

    async def read_all(self, prefix: str, after: str = "", most: int = 0) -> dict[str, str]:
        """The values of all keys with that prefix at one moment, ordered by key. Only those after the key `after`, and
        at most `most`, if that is not 0.
        """
        ...

    async def write(self, key: str, value: str) -> None:
        """Set the value."""
        ...

    async def swap(self, key: str, before: str | None, after: str | None) -> bool:
        """Replace the value `before` by `after`, where None stands for no value. Returns whether it was `before`. If
        the answer is lost, the caller cannot know that.
        """
        ...

    async def lend(self, key: str, value: str, seconds: float) -> bool:
        """Set the value for so many seconds. Returns whether this view has lent one without a gap since the first time:
        if not, another replica may have seen none.
        """
        ...

    async def take_back(self, key: str) -> None:
        """Remove the lent value."""
        ...

    def watch(self, prefix: str, within_s: float) -> AsyncGenerator[None, None]:
        """Yields at once, whenever a key with that prefix may have changed, and at least every `within_s` seconds."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
