"""What a session keeps in a layer, as the model's stack declares it: one state for each layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.domain.errors import FieldOutOfRange


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
    """

    nbytes: int


LayerState = TokenState | WindowState | FoldState


def attention_state(kv_heads: int, head_dim: int, window: int | None) -> LayerState:
    """That of a layer with attention: a key and a value for each head, of the last `window` tokens or of all."""
    numbers = 2 * kv_heads * head_dim
    return TokenState(numbers) if window is None else WindowState(numbers, window)


def window_of(states: Sequence[LayerState]) -> int | None:
    """How many of the last tokens some layer still needs; None: all. A block has all layers of its tokens, so where one
    layer needs all tokens, they are kept for every layer.

    Raises FieldOutOfRange for what blocks cannot hold: fold states, and layers of several sizes.
    """
    sizes = {None if isinstance(state, FoldState) else state.numbers for state in states}
    if len(sizes) != 1 or None in sizes:
        raise FieldOutOfRange("all layers must keep equally many numbers for each token", param="model")
    windows = [state.window for state in states if isinstance(state, WindowState)]
    return max(windows) if len(windows) == len(states) else None
