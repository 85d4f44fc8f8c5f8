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

from app.domain.errors import FieldOutOfRange

FLEET, PLACE = "fleet/", "place/"
MEMBER, JOURNAL, TOMB = f"{FLEET}member/", f"{FLEET}journal/", f"{FLEET}tombstone/"


class Store(Protocol):
    """One replica's view of it. Every method raises `DirectoryAway` if the store does not answer."""

    @property
    def shown(self) -> str:
        """Its address, without a password."""
        ...

    async def read(self, key: str) -> str | None:
        """The value; None: there is none."""
        ...

    async def read_all(self, prefix: str, after: str = "", most: int = 0) -> dict[str, str]:
        """The values of all keys that begin so, as they are at one moment: in their order those after the key `after`,
        `most` of them if that is not 0.
        """
        ...

    async def write(self, key: str, value: str) -> None:
        """Have that value from now on."""
        ...

    async def swap(self, key: str, before: str | None, after: str | None) -> bool:
        """Have the value `after`, if it is `before` now (None, for both: there is none). Returns whether it was. If the
        answer is lost, the caller cannot know.
        """
        ...

    async def lend(self, key: str, value: str, seconds: float) -> bool:
        """Have that value for so many seconds from now on. Whether there was one of this view all the time since it was
        lent first: False, and another replica may have seen none.
        """
        ...

    async def take_back(self, key: str) -> None:
        """End what has been lent."""
        ...

    def watch(self, prefix: str, within_s: float) -> AsyncGenerator[None, None]:
        """Yields at once, then whenever a key that begins so may have changed, and after `within_s` seconds at the
        latest.
        """
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


def open_store(text: str) -> Store:
    """The store of `--cluster`. Raises `FieldOutOfRange` for an address that cannot be one."""
    from app.cluster.etcd import SCHEMES, EtcdStore  # httpx takes a moment to import
    from app.cluster.folder import FolderStore

    scheme, _, rest = text.partition(":")
    if scheme == "folder" and rest:
        return FolderStore(rest)
    if scheme in SCHEMES:
        return EtcdStore(text)
    raise FieldOutOfRange(
        f"cluster: must be etcd://HOST:PORT, etcds://HOST:PORT or folder:PATH; got {text[:20]!r}", param="cluster"
    )
