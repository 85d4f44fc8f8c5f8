"""What KV memory contains, without numbers: for every slot the history that its key and value were computed from."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from app.domain.values import SessionId
from app.gpu.planning.queue import StepPlan
from app.gpu.state.drafts import Drafted
from app.gpu.state.layer_state import ONE_GROUP, Groups
from app.gpu.state.moves import Move, MoveKind
from app.gpu.state.sequence import TokenSequence

Content = tuple[object, ...]
Slots = dict[tuple[int, int], Content]


@dataclass
class ExportedFile:
    """A client's file: a history, and the content of the blocks with the KV of its first `computed` tokens. So many lie
    `behind` the window.
    """

    token_ids: tuple[int, ...]
    computed: int
    behind: int
    blocks: list[list[Content]]


class KVModel:
    """Does to its slots what a runner and a mover would do to memory, and checks what is read."""

    def __init__(self, block_size: int, window: int | None = None, groups: Groups = ONE_GROUP) -> None:
        """In groups with a window no token reads more than the last `window`; None: none has one."""
        self.device: Slots = {}
        self.host: Slots = {}
        self.files: dict[SessionId, list[list[Content]]] = {}
        self.exported: dict[str, ExportedFile] = {}
        self._size = block_size
        self._window, self._groups = window, groups

    def run(self, plan: StepPlan) -> None:
        """Make the plan's copies and writes, and check that every key a row reads belongs to its own history."""
        for source, target in plan.copies:
            self._copy(self.device, source, self.device, target)
        for row in plan.rows:
            for group, position in self._places(row.first, row.first + row.length):
                slot = self._slot(row.sequence.blocks, group, position)
                self.device[slot] = _content(row.sequence, group, position, row.draft)
        for row in plan.rows:
            end = row.first + row.length
            self._check(self.device, row.sequence.blocks, row.sequence, row.first, end, row.draft)

    def move(self, move: Move, namespace: bytes) -> None:
        """Make a move's copies, as memory is at this moment. `namespace` is its session's."""
        match move.kind:
            case MoveKind.OUT:
                self._copy_all(self.device, self.host, move)
            case MoveKind.IN:
                self._copy_all(self.host, self.device, move)
            case MoveKind.TO_DISK:
                self.files[move.session] = [self._read(self.host, block) for block in move.source]
            case MoveKind.FROM_DISK:
                for block, content in zip(move.target, self.files[move.session], strict=True):
                    self.host.update({(block, offset): found for offset, found in enumerate(content)})
            case MoveKind.EXPORT:
                self._export(move, namespace)
            case MoveKind.IMPORT:
                found = self.exported[move.path]  # the importer trusts it, and nobody else does
                self.files[move.session] = [[(namespace, *slot[1:]) for slot in block] for block in found.blocks]
            case MoveKind.DELETE:
                self.files.pop(move.session, None)

    def check_copies(self, sequences: Iterable[TokenSequence]) -> None:
        """Every host copy that a sequence counts on is of its own history."""
        for sequence in sequences:
            self._check(self.host, sequence.host_blocks, sequence, sequence.computed, sequence.computed)

    def check_files(self, sequences: Iterable[TokenSequence]) -> None:
        """As much of every file as a sequence counts on is of its own history."""
        for sequence in sequences:
            behind = sequence.disk_behind
            assert not sequence.disk_tokens or self._first_read(sequence.disk_tokens) >= self._tokens(behind)
            blocks = self._groups.spread(self.files.get(sequence.session, []), behind)
            for group, position in self._places(0, sequence.disk_tokens, behind):
                block, offset = self._slot(range(len(blocks)), group, position)
                assert blocks[block][offset] == _content(sequence, group, position, ())

    def _export(self, move: Move, namespace: bytes) -> None:
        blocks = [self._read(self.host, block) for block in move.source]
        assert self._first_read(move.computed) >= self._tokens(move.behind) or not move.computed
        spread = self._groups.spread(blocks, move.behind)
        for group, position in self._places(0, move.computed, move.behind):
            block, offset = self._slot(range(len(spread)), group, position)
            assert spread[block][offset] == (namespace, group, *move.token_ids[: position + 1])
        self.exported[move.path] = ExportedFile(move.token_ids, move.computed, move.behind, blocks)

    def _tokens(self, blocks: int) -> int:
        """Of so many blocks, whole stripes."""
        return blocks // self._groups.size * self._size

    def _places(self, first: int, end: int, behind: int = 0) -> Iterator[tuple[int, int]]:
        """Group and position of what is held of tokens `[first, end)`, if so many blocks lie `behind` the window."""
        for group in range(self._groups.size):
            held = max(first, self._tokens(behind)) if group >= self._groups.full else first
            yield from ((group, position) for position in range(held, end))

    def _first_read(self, position: int) -> int:
        """The first position that a token at `position` reads."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _check(
        self,
        slots: Slots,
        blocks: list[int],
        sequence: TokenSequence,
        position: int,
        end: int,
        draft: tuple[Drafted, ...] = (),
    ) -> None:
        """What is held up to `end` is of the history, and it is all that a token at `position` reads."""
        assert not blocks or self._first_read(position) >= self._tokens(sequence.behind)
        for group, position in self._places(0, min(end, self._tokens(len(blocks))), sequence.behind):
            assert slots[self._slot(blocks, group, position)] == _content(sequence, group, position, draft)

    def _copy_all(self, origin: Slots, goal: Slots, move: Move) -> None:
        for source, target in zip(move.source, move.target, strict=True):
            self._copy(origin, source, goal, target)

    def _copy(self, origin: Slots, source: int, goal: Slots, target: int) -> None:
        goal.update({(target, offset): found for offset, found in enumerate(self._read(origin, source))})

    def _read(self, slots: Slots, block: int) -> list[Content]:
        return [slots.get((block, offset), ()) for offset in range(self._size)]

    def _slot(self, blocks: Sequence[int], group: int, position: int) -> tuple[int, int]:
        return blocks[position // self._size * self._groups.size + group], position % self._size


def _content(sequence: TokenSequence, group: int, position: int, draft: tuple[Drafted, ...]) -> Content:
    tokens = sequence.tokens + [drafted.token_id for drafted in draft]
    return (sequence.namespace, group, *tokens[: position + 1])
