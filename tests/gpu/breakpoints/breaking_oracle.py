"""What Transformers computes where a forward hook changes the residual stream."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from app.domain.breakpoints import Edit, EditOp, TensorData, TensorParts
from app.gpu.device.hardware import dtype_name
from tests.gpu.models.oracle import expect
from tests.gpu.tiny_engine import greedy_tokens

Where = Callable[[int, int], bool]
"""Of a position and the token that stands there."""


def everywhere(position: int, token: int) -> bool:
    return True


def within(first: int, end: int) -> Where:
    return lambda position, _: first <= position < end


@dataclass(frozen=True)
class Change:
    """`formula` takes the residual stream after `layer`, `[hidden]` at one position, to what it shall be."""

    layer: int
    formula: Callable[[Tensor], Tensor]
    where: Where = everywhere


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers of any of the models that are tested."""
    return next(child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList))


@contextmanager
def hooked(model: Any, changes: Iterable[Change]) -> Iterator[None]:
    """Make the changes in every forward pass over one sequence, which comes in parts."""
    tokens: list[int] = []

    def note(module: nn.Module, args: object, kwargs: dict[str, Tensor]) -> None:
        tokens.extend(kwargs["input_ids"][0].tolist())

    layers = decoder_layers(model)
    handles = [model.register_forward_pre_hook(note, with_kwargs=True)]
    handles += [layers[change.layer].register_forward_hook(_hook(change, tokens)) for change in changes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def greedy(model: Any, prompt: list[int], count: int, changes: Sequence[Change] = ()) -> list[int]:
    """The `count` tokens that Transformers puts after `prompt` with these changes."""
    with hooked(model, changes):
        return greedy_tokens(model, prompt, count)


def boundaries(model: Any, tokens: list[int]) -> list[Tensor]:
    """The residual stream before every layer, and after the last one; `[tokens, hidden]` each."""
    with torch.no_grad():
        return expect(model, torch.tensor(tokens)).boundaries


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """But for the order of additions."""
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4


def edited(op: EditOp, hidden: Tensor, factor: float, vector: Tensor, max_norm: float | None = None) -> Tensor:
    """The change of one position's `hidden` `[hidden_size]`, from the mathematics of each operation."""
    unit = vector / torch.linalg.vector_norm(vector)
    along = torch.dot(hidden, unit)
    results: dict[EditOp, Tensor] = {
        EditOp.SCALE: hidden * factor,
        EditOp.ADD: hidden + vector * factor,
        EditOp.REPLACE: vector,
        EditOp.PROJECT_OUT: hidden - along * unit,
        EditOp.CLAMP: hidden - along * unit + factor * unit,
        EditOp.ABLATE: torch.zeros_like(hidden),
    }
    result = results[op]
    change = result - hidden
    length = float(torch.linalg.vector_norm(change))
    return result if max_norm is None or length <= max_norm else hidden + change * (max_norm / length)


def change_of(layer: int, edit: Edit, where: Where = everywhere) -> Change:
    """The hook that does what `edit` asks for at the positions `where`."""
    given = torch.ones(1) if edit.vector is None else tensor_of(edit.vector)

    def formula(hidden: Tensor) -> Tensor:
        return edited(edit.op, hidden, edit.factor, given.expand_as(hidden), edit.max_norm)

    return Change(layer, formula, where)


def tensor_of(found: TensorData | TensorParts) -> Tensor:
    """The tensor that these bytes are."""
    data = found.joined() if isinstance(found, TensorParts) else found
    return torch.frombuffer(bytearray(data.data), dtype=getattr(torch, data.dtype)).reshape(data.shape)


def data_of(tensor: Tensor) -> TensorData:
    """A tensor as it travels to the engine."""
    name = dtype_name(tensor.dtype)
    return TensorData(name, tuple(tensor.shape), tensor.contiguous().numpy().tobytes())


def _hook(change: Change, tokens: list[int]) -> Callable[[nn.Module, object, Any], Any]:
    def hook(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        first = len(tokens) - hidden.shape[1]
        for row in range(hidden.shape[1]):
            if change.where(first + row, tokens[first + row]):
                hidden[0, row] = change.formula(hidden[0, row])
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    return hook
