"""LoRA adapters beside a model's matrices: rows of several adapters, and rows of none, in one batch.

A module's `y = x W^T` becomes `y + scale * (x A^T) B^T` in the rows of a session that has the adapter. The base's
product is made for all rows at once, as without adapters: so the bits of other rows stay what they were. The rows of
each adapter are then multiplied by its factors, in layers of the same kind as the base's own, which sum each row alike
in any batch. Modules that share a matrix here, such as queries, keys and values, share one product with `A`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from app.domain.errors import AdapterMissing, AdaptersFull, BadAdapter
from app.domain.memory_map import AdapterUse
from app.domain.values import LoadedAdapter
from app.gpu.kernels.linear import MakeLinear
from app.gpu.kernels.linear.base import Linear
from app.gpu.weights.adapters import Factors, read_adapter
from app.machine.files import size

Rows = slice | Tensor
"""Tokens of a batch: `[n]` int64, or neighbours."""
Dense = Callable[[Tensor], Tensor]
"""`[tokens, inputs]` to `[tokens, outputs]`: a dense layer, and what adapters add to it."""


@dataclass(frozen=True, slots=True)
class Addition:
    """What an adapter adds to one layer's results. `down` is the factors A of all its modules, one below the other."""

    down: Linear
    ups: Sequence[tuple[Linear, slice, slice, float]]
    """For each module its B, the part of `down`'s outputs that it takes, that of the results, and the scale."""

    def add(self, x: Tensor, y: Tensor, rows: Rows) -> None:
        """Add to rows `rows` of `y` `[tokens, out]` what the adapter makes of those of `x` `[tokens, in]`."""
        low = self.down(x[rows])
        for up, taken, given, scale in self.ups:
            more, part = up((low[:, taken] * scale).contiguous()), y[:, given]
            if isinstance(rows, slice):
                part[rows] += more
            else:
                part.index_add_(0, rows, more)

    @property
    def nbytes(self) -> int:
        """Of all factors, as they are kept."""
        layers = (self.down, *(up for up, *_ in self.ups))
        return sum(weight.tensor.nbytes for layer in layers for weight in layer.weights)


Additions = Mapping[int, Addition]
"""What one adapter adds, by the number of the layer that it is added to."""


class Sites:
    """The dense layers of a stack that adapters may add to: not those of experts, which have only some of a batch's
    tokens. `rows` are those of the batch that runs, by adapter: the stack sets them for each of its layers.
    """

    def __init__(self) -> None:
        self.rows: Sequence[tuple[Additions, Rows]] = ()
        self.shapes: dict[str, tuple[int, int]] = {}
        """Of the matrix of each module, `[out, in]`."""
        self._places: dict[str, tuple[int, int, Tensor | None]] = {}
        """The number of each module's layer, where in its results those of the module begin, and their order."""
        self._layers = 0

    def adapted(
        self,
        linear: Linear,
        modules: Mapping[str, int],
        inputs: int,
        orders: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Dense:
        """The layer of all `modules`, which have so many outputs each, with what adapters add to it. `orders` are those
        of some modules' outputs, as `Parts.cut` has them.
        """
        begin, number = 0, self._layers
        self._layers += 1
        for name, outputs in modules.items():
            self.shapes[name], self._places[name] = (outputs, inputs), (number, begin, orders.get(name))
            begin += outputs

        def run(x: Tensor) -> Tensor:
            y = linear(x)
            for adapter, rows in self.rows:
                addition = adapter.get(number)
                if addition is not None:
                    addition.add(x, y, rows)
            return y

        return run

    def additions(self, modules: Mapping[str, Factors], make: MakeLinear, device: torch.device) -> Additions:
        """What an adapter of these modules adds."""
        of_layer = dict[int, list[str]]()
        for name in sorted(modules, key=lambda name: self._places[name][:2]):
            of_layer.setdefault(self._places[name][0], []).append(name)
        found = dict[int, Addition]()
        for number, names in of_layer.items():
            ups, low = list[tuple[Linear, slice, slice, float]](), 0
            for name in names:
                factors, (_, begin, order) = modules[name], self._places[name]
                taken, given = slice(low, low + factors.rank), slice(begin, begin + self.shapes[name][0])
                up = factors.up if order is None else factors.up[order]
                ups.append((make(up.to(device), None, 1), taken, given, factors.scale))
                low += factors.rank
            down = torch.cat([modules[name].down for name in names])
            found[number] = Addition(make(down.to(device), None, 1), ups)
        return found


class Adapters:
    """The adapters that are loaded, by digest, and the memory that they have. The engine thread alone uses it."""

    def __init__(self, sites: Sites | str, make: MakeLinear, device: torch.device, limit: int) -> None:
        """`sites` is a sentence if the model has none. Adapters take at most `limit` bytes."""
        self.loaded: dict[str, Additions] = {}
        self._told: dict[str, LoadedAdapter] = {}
        self._sites, self._make, self._device, self._limit = sites, make, device, limit

    def load(self, folder: Path) -> LoadedAdapter:
        """Load what PEFT has written to `folder`; the same files twice are one adapter.

        Raises `BadAdapter`, and `AdaptersFull` if it does not fit beside the others.
        """
        if isinstance(self._sites, str):
            raise BadAdapter(self._sites)
        room = self._limit - self.use().bytes
        digest, modules = read_adapter(folder, self._sites.shapes, room)
        known = self._told.get(digest)
        if known is not None:
            return known
        with torch.inference_mode():
            additions = self._sites.additions(modules, self._make, self._device)
        nbytes = sum(each.nbytes for each in additions.values())
        if nbytes > room:
            raise AdaptersFull(f"{folder} takes {size(nbytes)}; adapters may take {size(room)} more: unload others")
        rank = max(factors.rank for factors in modules.values())
        self.loaded[digest] = additions
        self._told[digest] = LoadedAdapter(digest, nbytes, rank, len(modules))
        return self._told[digest]

    def unload(self, digest: str) -> None:
        """Forget an adapter that no turn uses."""
        self.loaded.pop(digest, None)
        self._told.pop(digest, None)

    def require(self, digest: str) -> None:
        """Raise `AdapterMissing` for an adapter that is not loaded; empty: none is needed."""
        if digest and digest not in self.loaded:
            raise AdapterMissing(f"the session's adapter, {digest[:12]}, is not loaded")

    def use(self) -> AdapterUse:
        """The memory that they take."""
        return AdapterUse(len(self.loaded), sum(each.nbytes for each in self._told.values()), self._limit)
