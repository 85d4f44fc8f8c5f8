"""Named vectors that edits can refer to."""

from app.domain.breakpoints import TensorData
from app.domain.errors import FieldOutOfRange, NotFound
from app.journal.journal import Journal
from app.journal.records import VectorKey
from app.sessions.guards.journal_room import JournalRoom

MAX_VECTORS = 1000


class Vectors:
    """Every owner's vectors, journaled if there is a journal. Used on the event loop only."""

    def __init__(self, journal: Journal | None, room: JournalRoom | None = None) -> None:
        """Takes up what the journal has, which must have been loaded. `room` is that on its disk."""
        self._journal = journal
        self._room = room or JournalRoom(None)
        self._vectors: dict[VectorKey, TensorData] = {} if journal is None else journal.load_vectors()

    def get(self, owner: str | None, name: str) -> TensorData:
        """The owner's vector of that name. Raises `NotFound`."""
        found = self._vectors.get(VectorKey(owner, name))
        if found is None:
            raise NotFound(f"no vector {name[:100]!r}", param="vector")
        return found

    def owned_by(self, owner: str | None) -> dict[str, TensorData]:
        """The owner's vectors by name, in the order of their names."""
        mine = {key.name: tensor for key, tensor in self._vectors.items() if key.owner == owner}
        return dict(sorted(mine.items()))

    async def put(self, owner: str | None, name: str, tensor: TensorData) -> None:
        """Keep `tensor`, in the place of the owner's vector of that name if there is one.

        Breakpoints keep the vector that they were armed with. Raises `FieldOutOfRange` if the owner has too many
        vectors, `DiskShort`, and `NotDurable` if the journal failed: the vector is there, but a restart would lose it.
        """
        if name not in (mine := self.owned_by(owner)) and len(mine) >= MAX_VECTORS:
            raise FieldOutOfRange(f"there are {MAX_VECTORS} vectors, the most allowed: delete some", param="name")
        with self._room.claiming(len(tensor.data)):
            await self._write(VectorKey(owner, name), tensor)

    async def delete(self, owner: str | None, name: str) -> None:
        """Forget the vector. Raises `NotFound`, and `NotDurable` like `put`."""
        self.get(owner, name)
        await self._write(VectorKey(owner, name), None)

    async def _write(self, key: VectorKey, tensor: TensorData | None) -> None:
        if tensor is None:
            del self._vectors[key]
        else:
            self._vectors[key] = tensor
        if self._journal is not None:
            self._journal.append(key, tensor)
            await self._journal.settled(key)
