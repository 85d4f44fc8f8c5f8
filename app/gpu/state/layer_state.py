"""What a session keeps in a layer, as the model's stack declares it: one state for each layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from app.domain.errors import FieldOutOfRange

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenState:
    """So many numbers for each token: keys and values, or a latent that they are made from."""

    numbers: int


@dataclass(frozen=True, slots=True)
class WindowState:
    """The same for the last `window` tokens: no token sees more of them, itself included."""

    numbers: int
    window: int


@dataclass(frozen=True, slots=True)
class FoldState:
    """So many bytes for each sequence, replaced at each token: what a convolution or a recurrence remembers. They are
    of the stack's own types, whatever KV is kept as.

    A layer may also attend: it keeps `attention` then. One that mixes no tokens at all keeps 0 bytes.
    """

    nbytes: int
    attention: TokenState | WindowState | None = None
    fits: Sequence[Callable[[int], bool]] | None = field(default=None, compare=False)
    """Of each of its parts that not all blocks suit, whether blocks of so many bytes do: then the layer folds into the
    state where it is kept. None: it takes memory of its own.
    """


@dataclass(frozen=True, slots=True)
class SharedState:
    """Nothing: attention reads the keys and values of an earlier `layer`, and may store the same there again."""

    layer: int


LayerState = TokenState | WindowState | FoldState | SharedState
STATE_ALIGN = 16
"""In the bytes of a sequence's state, each layer's begin at a multiple of this."""

UNDIVIDED = 1 << 30
"""Tokens of a block of a model that keeps nothing for each: more than a sequence has."""


def attention_state(kv_heads: int, head_dim: int, window: int | None) -> TokenState | WindowState:
    """That of a layer with attention: a key and a value for each head, of the last `window` tokens or of all."""
    numbers = 2 * kv_heads * head_dim
    return TokenState(numbers) if window is None else WindowState(numbers, window)


def attending(states: Sequence[LayerState]) -> list[TokenState | WindowState | None]:
    """What the attention of each layer keeps; None: it keeps nothing."""
    kept = [None if isinstance(state, SharedState) else state for state in states]
    return [state.attention if isinstance(state, FoldState) else state for state in kept]


def keeps_tokens(states: Sequence[LayerState]) -> bool:
    """Whether some layer keeps something for each token."""
    return any(state is not None for state in attending(states))


class Groups(NamedTuple):
    """Blocks of a stripe: so many without a window, then so many with one.

    How many of a sequence's blocks lie `behind` the window counts all blocks of its first stripes. Only those with a
    window are let go of.
    """

    full: int
    windowed: int

    @property
    def size(self) -> int:
        """Blocks of a stripe."""
        return self.full + self.windowed

    def count_held(self, end: int, behind: int) -> int:
        """How many of the first `end` blocks are held, if so many lie `behind` the window."""
        full, windowed = self
        return end - min(end, behind) // (full + windowed) * windowed

    def held(self, blocks: list[T], behind: int) -> list[T]:
        """Those of `blocks`, whole stripes from any on, that are held if so many of them lie `behind` the window."""
        if behind <= 0:
            return blocks
        if not self.full:
            return blocks[behind:]
        places = range(0, min(behind, len(blocks)), self.size)
        return [block for place in places for block in blocks[place : place + self.full]] + blocks[behind:]

    def spread(self, held: Sequence[T], behind: int) -> list[T]:
        """The blocks that `held` are those of. In place of one that is not held stands one that is: a kernel which
        looks there finds numbers of the same sequence.
        """
        if behind <= 0:
            return list(held)
        if not self.full:
            return [*list(held[:1]) * behind, *held]
        blocks, end = list[T](), min(behind // self.size * self.full, len(held))
        for place in range(0, end, self.full):
            blocks += [*held[place : place + self.full], *[held[place]] * self.windowed]
        return [*blocks, *held[end:]]

    def leave(self, blocks: list[T], before: int, behind: int) -> list[T]:
        """Let go of those that lie behind the window now, and did not `before`; returns them."""
        if not self.full:
            left = blocks[before:behind]
            blocks[:behind] = blocks[behind : behind + 1] * behind  # all go if none is held
            return left
        left = []
        for place in range(before, min(behind, len(blocks)), self.size):
            first, end = place + self.full, place + self.size
            left += blocks[first:end]
            blocks[first:end] = blocks[place : place + 1] * self.windowed
        return left


ONE_GROUP = Groups(1, 0)


@dataclass(frozen=True, slots=True)
class Division:
    """How the KV of a model's layers lies in blocks: each has that of at most `layers` layers, all of one group.

    `places` are the group of each layer of the model, and its place there; of one that does not attend they are those
    of another. `window` is that of the groups that have one; None: none has.
    """

    layers: int
    groups: Groups
    places: Sequence[tuple[int, int]]
    window: int | None


def divide(states: Sequence[LayerState]) -> Division:
    """Layers with a window in groups without others, if not all have one: what each kind keeps is freed by itself. All
    groups have blocks of one size, so any block serves any group. The groups are the largest of which at most an eighth
    of each kind's places stay empty, and none of the first: its blocks stand in for those behind the window, where a
    kernel must find the sequence's own numbers. Without both kinds of layers there is one group. Layers that share have
    the place of the one whose keys and values they read.

    So there is beside layers that fold: a sequence that goes back to an earlier state finds all tokens. The window is
    the widest. Raises FieldOutOfRange for what blocks cannot hold: layers of several sizes.
    """
    kept = attending(states)
    if len({state.numbers for state in kept if state is not None}) > 1:
        raise FieldOutOfRange("all layers must keep equally many numbers for each token", param="model")
    windows = [state.window for state in states if isinstance(state, WindowState)]
    if not windows or any(isinstance(state, FoldState) for state in states):
        layers, groups, window = max(1, len(kept) - kept.count(None)), ONE_GROUP, None
    else:
        counts = len(kept) - kept.count(None) - len(windows), len(windows)
        layers = counts[0] or counts[1]
        while any(-count % layers > count // 8 for count in counts):
            layers -= 1
        groups, window = Groups(*(-(-count // layers) for count in counts)), max(windows)
    placed, places = [0, groups.full * layers], list[tuple[int, int]]()
    for state, own in zip(states, kept, strict=True):
        if isinstance(state, SharedState):
            places.append(places[state.layer])
            continue
        has_window = window is not None and isinstance(state, WindowState)
        placed[has_window] += own is not None
        places.append(divmod(max(0, placed[has_window] - 1), layers))
    return Division(layers, groups, places, window)


def state_bytes(states: Sequence[LayerState]) -> int:
    """Bytes that a sequence has for all its folding layers, one layer behind the other."""
    return sum(aligned(state.nbytes) for state in states if isinstance(state, FoldState))


def aligned(nbytes: int) -> int:
    """The next multiple of `STATE_ALIGN`."""
    return -(-nbytes // STATE_ALIGN) * STATE_ALIGN
