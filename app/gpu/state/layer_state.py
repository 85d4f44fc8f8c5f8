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

    A layer may also attend: it keeps `attention` then. One that mixes no tokens at all keeps 0 bytes.
    """

    nbytes: int
    attention: TokenState | WindowState | None = None


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


def kv_layers(states: Sequence[LayerState]) -> int:
    """How many layers a KV pool holds. Of a model that only folds it is one, to which nothing is written."""
    return max(1, sum(state is not None for state in attending(states)))


def state_bytes(states: Sequence[LayerState]) -> int:
    """Bytes that a sequence has for all its folding layers, one layer behind the other."""
    return sum(aligned(state.nbytes) for state in states if isinstance(state, FoldState))


def aligned(nbytes: int) -> int:
    """The next multiple of `STATE_ALIGN`."""
    return -(-nbytes // STATE_ALIGN) * STATE_ALIGN


def window_of(states: Sequence[LayerState]) -> int | None:
    """How many of the last tokens some layer still needs; None: all. A block has all layers of its tokens, so where one
    layer needs all tokens, they are kept for every layer. So they are beside layers that fold: a sequence that goes
    back to an earlier state finds them.

    Raises FieldOutOfRange for what blocks cannot hold: layers of several sizes.
    """
    kept = [state for state in attending(states) if state is not None]
    if len({state.numbers for state in kept}) > 1:
        raise FieldOutOfRange("all layers must keep equally many numbers for each token", param="model")
    windows = [state.window for state in states if isinstance(state, WindowState)]
    return max(windows) if all(isinstance(state, WindowState | SharedState) for state in states) else None
