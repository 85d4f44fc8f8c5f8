"""The points of a layer of Transformers' modules, which hooks can reach.

Where they are is found when a layer first runs, by what its modules take and give: names tell which one attends and
which one feeds forward, and numbers what is added to what. A point is there only if that is certain. A hook changes a
tensor in place, so the residual stream inside a layer counts only if the layer adds to the very tensor that a norm has
taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.domain.points import Point, PointShape
from app.gpu.kernels.attention.base import Taps

_MIXERS = (
    "self_attn",
    "self_attention",
    "attention",
    "attn",
    "linear_attn",
    "mamba",
    "mixer",
    "conv",
    "temporal_block",
)
"""What modules are called that mix tokens, where a layer has them."""
_FEED_FORWARDS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "mlp_block")
_NEURONS = (
    ("gate_proj", "down_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("fc_in", "fc_out"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("up_proj", "down_proj"),
)
"""Of a feed-forward the module that gives neurons before their activation, and the one that takes them behind it."""
_ROUTERS = ("gate", "router")
"""Of a feed-forward that has experts, the module that chooses among them."""
_CLOSE = 1e-4
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hook:
    """A point is what the module takes, or what it gives; or `is_product`, what it makes of its weight."""

    module: nn.Module
    takes: bool
    shape: PointShape
    is_product: bool = False


Hooks = Mapping[Point, Hook]


class _Call(NamedTuple):
    """One of a module that a layer has. Values are as they were then."""

    name: str
    module: nn.Module
    taken: Tensor
    taken_value: Tensor
    given: Tensor
    given_value: Tensor
    moment: int
    """How many additions there had been."""


@contextmanager
def told(hooks: Hooks, taps: Taps | None) -> Iterator[None]:
    """The taps are told of the points of a layer that runs meanwhile."""
    with ExitStack() as stack:
        for point, hook in hooks.items():
            if taps is not None and point in taps.points:
                stack.enter_context(_hooked(point, hook, taps))
        yield


@contextmanager
def _hooked(point: Point, hook: Hook, taps: Taps) -> Iterator[None]:
    heads = hook.shape.heads

    def tell(found: Tensor) -> None:
        flat = found.view(-1, found.shape[-1])
        taps(point, flat if heads == 1 else flat.view(len(flat), heads, -1))

    if hook.is_product:
        with _products_of(hook.module, tell):
            yield
        return
    if hook.takes:
        handle = hook.module.register_forward_pre_hook(
            lambda _module, args, kwargs: tell(_first((args, kwargs))), with_kwargs=True
        )
    else:
        handle = hook.module.register_forward_hook(lambda _module, _args, given: tell(_first(given)))
    try:
        yield
    finally:
        handle.remove()


class _Products(TorchFunctionMode):
    """Tells of each product with a matrix, before anything is made of it."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is nn.functional.linear:
            self._tell(found)
        return found


@contextmanager
def _products_of(module: nn.Module, tell: Callable[[Tensor], None]) -> Iterator[None]:
    """`tell` gets the products of the module meanwhile, whenever it runs: it may change them in place."""
    mode: Any = _Products(tell)
    handles = [
        module.register_forward_pre_hook(lambda _module, _args: mode.__enter__() and None),
        module.register_forward_hook(lambda _module, _args, _given: mode.__exit__(None, None, None), always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first(given: Any) -> Tensor:
    return next(each for each in tree_leaves(given) if isinstance(each, Tensor))


class _Added(TorchDispatchMode):
    """Notes where the memory of tensors begins that something is added to, or that are added, in this order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at = list[int]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in `forward.programs`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            self.at += [each.data_ptr() for each in tree_leaves(args) if isinstance(each, Tensor)]
        return func(*args, **(kwargs or {}))


def find_hooks(
    layer: nn.Module, hidden: Tensor, run: Callable[[], T], sizes: Mapping[str, tuple[int, int]]
) -> tuple[T, Hooks]:
    """What `run` gives, which runs `layer` on `hidden`, and the hooks of the layer, if it has some. `sizes` are heads
    and their width of `q_proj`, `k_proj` and `v_proj`, where they are known.
    """
    calls, added, before = list[_Call](), _Added(), hidden.clone()
    routers: dict[nn.Module, list[Tensor]] = {module: [] for module in _routers(layer)}
    handles = [
        child.register_forward_hook(_noting(name, calls, added.at), with_kwargs=True)
        for name, child in layer.named_children()
    ]
    try:
        with added, ExitStack() as stack:
            for module, products in routers.items():
                stack.enter_context(_products_of(module, products.append))
            output = run()
    finally:
        for handle in handles:
            handle.remove()
    after = _first(output)
    calls = [call for call in calls if call.given.shape == call.taken.shape == hidden.shape]
    mixer = next((call for name in _MIXERS for call in calls if call.name == name), None)
    feed_forward = next((call for name in _FEED_FORWARDS for call in calls if call.name == name), None)
    found = dict[Point, Hook]()
    stream = PointShape(hidden.shape[-1])
    if mixer is not None:
        found |= _around(calls, mixer, feed_forward, before, after, added.at)
        if feed_forward is not None and feed_forward.taken.data_ptr() in (hidden.data_ptr(), mixer.taken.data_ptr()):
            found.pop(Point.MLP_IN, None)
        if mixer.taken.data_ptr() != hidden.data_ptr():
            found[Point.ATTN_IN] = Hook(mixer.module, True, stream)
        for point, name in ((Point.Q, "q_proj"), (Point.K, "k_proj"), (Point.V, "v_proj")):
            projection, (count, width) = getattr(mixer.module, name, None), sizes.get(name, (0, 0))
            if isinstance(projection, nn.Linear) and projection.out_features == count * width > 0:
                found[point] = Hook(projection, False, PointShape(count * width, count))
    if feed_forward is not None:
        found |= _neurons(feed_forward.module)
    for module, products in routers.items():
        if len(products) == 1:  # else which one has the scores is not certain
            shape = PointShape(products[0].shape[-1])
            found[Point.ROUTER_LOGITS] = Hook(module, False, shape, is_product=True)
    return output, found


def _routers(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that score experts: one, or none."""
    mixtures = (getattr(layer, name, None) for name in _FEED_FORWARDS)
    own = [each for each in mixtures if isinstance(each, nn.Module) and hasattr(each, "experts")]
    found = [getattr(each, name, None) for each in own for name in _ROUTERS]
    return [each for each in found if isinstance(each, nn.Module)][:1]


def _noting(name: str, calls: list[_Call], added: list[int]) -> Callable[[nn.Module, Any, Any, Any], None]:
    def note(module: nn.Module, args: Any, kwargs: Any, given: Any) -> None:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        results = [each for each in tree_leaves(given) if isinstance(each, Tensor)]
        if tensors and results:
            first, result = tensors[0], results[0]
            calls.append(_Call(name, module, first, first.clone(), result, result.clone(), len(added)))

    return note


def _around(
    calls: list[_Call], mixer: _Call, feed_forward: _Call | None, before: Tensor, after: Tensor, added: list[int]
) -> Hooks:
    """What a layer adds to the residual stream, and the stream between both."""
    stream, first = PointShape(before.shape[-1]), calls.index(mixer)
    second = len(calls) if feed_forward is None else calls.index(feed_forward)
    middles = [call for call in calls[first + 1 : second + 1] if call.taken.data_ptr() in added[call.moment :]]

    def giving(some: list[_Call], wanted: Tensor, base: Tensor) -> nn.Module | None:
        """Which of the modules gives what makes `wanted` of `base`."""
        return next((call.module for call in some if _same(base + call.given_value, wanted)), None)

    if feed_forward is None:
        own = giving(calls[first:], after, before)
        return {} if own is None else {Point.ATTN_OUT: Hook(own, False, stream)}
    for middle in middles:
        gives = giving(calls[first:second], middle.taken_value, before)
        adds = giving(calls[second:], after, middle.taken_value)
        if gives is not None and adds is not None:
            between = {Point.RESID_MID: Hook(middle.module, True, stream)}
            if middle.taken.data_ptr() != feed_forward.taken.data_ptr():
                between[Point.MLP_IN] = Hook(feed_forward.module, True, stream)
            both = {Point.ATTN_OUT: Hook(gives, False, stream), Point.MLP_OUT: Hook(adds, False, stream)}
            return both | between
    for call in calls[first:second]:  # both may add to what the layer takes
        adds = giving(calls[second:], after, before + call.given_value)
        if adds is not None:
            return {
                Point.ATTN_OUT: Hook(call.module, False, stream),
                Point.MLP_IN: Hook(feed_forward.module, True, stream),
                Point.MLP_OUT: Hook(adds, False, stream),
            }
    return {}


def _neurons(feed_forward: nn.Module) -> Hooks:
    for up, down in _NEURONS:
        first, second = getattr(feed_forward, up, None), getattr(feed_forward, down, None)
        if isinstance(first, nn.Linear) and isinstance(second, nn.Linear) and first.out_features == second.in_features:
            shape = PointShape(second.in_features)
            return {Point.MLP_PRE: Hook(first, False, shape), Point.MLP_POST: Hook(second, True, shape)}
    return {}


def _same(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= _CLOSE * wanted.abs().max())
