"""Any other decoder, driven through its own Transformers modules: general, and slower than a family of ours.

The decoder's layers are taken out and replaced by recorders. The model's own forward then does all that lies around the
layers (embedding and its scale, rotary tables, final norm, logit scaling) and hands each recorder the arguments that
its layer wants. Djinn's attention stands behind Transformers' attention interface. Whether that is all there is to the
architecture is not assumed but proved when it is loaded: for the first tokens of a sequence, and for some that come
after thousands, whose keys and values are random.

A module that folds tokens into a state (`models.folding`) runs row by row, each from its own state.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate, pairwise
from types import EllipsisType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, Cache, DynamicCache, DynamicLayer, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionAndFullAttentionLayer
from transformers.initialization import no_init_weights

from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch, make_batch
from app.gpu.models.base import TOLERANCE, require_fixed_rope, with_new_states
from app.gpu.models.folding import Fold, find_folds, running
from app.gpu.state.layer_state import FoldState, LayerState, aligned, attention_state
from app.gpu.weights.source import RandomWeights, TensorFormat
from app.model_store.install import BrokenModel
from app.model_store.resolve import ResolvedModel

Attend = Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]
"""`Attention` over the batch and the KV of one layer's call: of queries, keys, values and a spec."""
_NAME = "djinn_paged"
_call = threading.local()
"""Of the layer that this thread runs: `attend`, and the `window` of the mask that its attention had. Not every
architecture passes keyword arguments on to attention.
"""
_WITHOUT_EFFECT = {"cache_position", "dropout", "is_causal", "position_ids", "use_cache"}
"""Keywords that reach attention and change nothing here: positions are in the batch, there is no dropout outside
training, no cache but the pool, and causality is implied."""
_ATTENTION_TYPES = {"full_attention", "sliding_attention"}
_LAYER_TYPES = {*_ATTENTION_TYPES, "linear_attention", "conv", "hybrid", "dummy", "moe", "mlp"}
_PROOF_TOKENS = 8
_PART = 2
"""Tokens of each part of a prefill."""
_PROOF_LENGTH = 8192 + 2 * _PROOF_TOKENS
"""Past the windows of most models, and the lengths that most were made for before their frequencies were scaled."""
_PROOF_BLOCK = 16
_STATE_PARTS = 32
"""About so many blocks have the state of a sequence, where nothing is kept for each token."""


def load_transformers_stack(
    model: ResolvedModel, device: torch.device, dtype: torch.dtype, attention: Attention, max_model_len: int
) -> TransformersStack:
    """Raises ValueError, with the reason, for an architecture that cannot be run layer by layer."""
    text = model.config.get_text_config()
    require_fixed_rope(text)
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError("its weights are quantized, which only models with Djinn's own layers may have")
    others = set(_layer_types(text)) - _LAYER_TYPES
    if others:
        raise ValueError(f"it has layers of type {', '.join(sorted(others))}")
    modules = _load_modules(model, device, dtype).eval().requires_grad_(False)
    return TransformersStack(modules, attention, max_model_len)


def _load_modules(model: ResolvedModel, device: torch.device, dtype: torch.dtype) -> Any:
    """With random weights, or through Transformers' own loader: it knows the checkpoints whose names differ from the
    modules'.
    """
    auto: Any = AutoModelForCausalLM  # annotated only in part
    config, folder = deepcopy(model.config), model.folder  # Transformers keeps the choice of attention in the config
    if folder is None:
        with device, no_init_weights():
            modules = auto.from_config(config, dtype=dtype, attn_implementation="eager")
        source = RandomWeights(model.seed, config, TensorFormat(device, dtype))
        for name, parameter in modules.named_parameters():
            parameter.data = source.take(name, tuple(parameter.shape))
        return modules
    try:
        modules, report = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise BrokenModel(f"cannot read the weights in {folder}: {error}", param="model") from error
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        raise BrokenModel(f"the weights in {folder} do not fit the model: {wrong}", param="model")
    return modules.to(device)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | EllipsisType | None = ...,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function Transformers calls: query and key `[1, heads, tokens, head_dim]`, value `[1, heads, tokens, value
    dim]`, result `[1, tokens, heads, value dim]`.

    Raises ValueError for a model that asks of attention what `AttentionSpec` cannot say.
    """
    extra = sorted(name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT)
    if extra:
        raise ValueError(f"its attention takes {', '.join(extra)}")
    window = _call.window if isinstance(sliding_window, EllipsisType) else sliding_window
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ValueError("its attention is not causal")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    sinks = None if s_aux is None else s_aux.float()
    return _call.attend(query, key, value, AttentionSpec(scale, window, softcap, sinks))[None], None


AttentionInterface.register(_NAME, paged_attention)


class _Recorder(nn.Module):
    """Stands in for a layer: keeps what it was called with, and passes `answer`, or else its input, on. While it is
    `transparent` it passes on what the layer answers. Some layers answer with a tuple that begins with that.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.received: Tensor
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]]
        self.answer: Tensor | None = None
        self.behind: tuple[Any, ...] | None = None
        """What the layer's tuple has behind the tensor, if it answers with one."""
        self.transparent = True

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.received, self.arguments = hidden_states, (args, kwargs)
        if self.transparent:
            found = self.layer(hidden_states, *args, **kwargs)
            self.behind = found[1:] if isinstance(found, tuple) else None
            return found
        answer = hidden_states if self.answer is None else self.answer
        return answer if self.behind is None else (answer, *self.behind)

    def __getattr__(self, name: str) -> Any:
        """What the forward reads off a layer, such as `attention_type`, is the layer's own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def _layer_types(config: Any) -> Sequence[str]:
    """As a config of the text names them; most models have only attention, and name none."""
    return getattr(config, "layer_types", None) or ()


class _Heads(NamedTuple):
    """Shapes of what a layer gives to attention for one token: `[kv_heads, key_dim]` and `[kv_heads, value_dim]`."""

    kv_heads: int
    key_dim: int
    value_dim: int


class _Past(DynamicLayer):
    """Random keys and values of a sequence's first `length` tokens, or latents that a layer makes them of, which every
    layer sees before its own.

    Values are large enough that their mean weighs as much as one key's would.
    """

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        self._states: dict[Any, list[Tensor]] = {}
        """By shape, `[1, heads, length, dim]` each."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = key_states, value_states
        shapes = tuple(states.shape[1::2] for states in new)
        if shapes not in self._states:
            generator = torch.Generator(key_states.device).manual_seed(0)
            self._states[shapes] = [
                states.new_empty(*states.shape[:2], self.length, states.shape[3]).normal_(0, std, generator=generator)
                for states, std in zip(new, (1.0, self.length**0.5), strict=True)
            ]
        keys, values = (torch.cat(pair, 2) for pair in zip(self._states[shapes], new, strict=True))
        return keys, values

    def get_seq_length(self) -> int:
        return self.length


class _PastAndFold(LinearAttentionAndFullAttentionLayer):
    """The same for a layer that folds too, into a state that begins where its own tokens do."""

    def __init__(self, past: _Past) -> None:
        super().__init__()
        self.update = past.update  # type: ignore[method-assign]
        self.get_seq_length = past.get_seq_length  # type: ignore[method-assign]


class TransformersStack:
    """A `LayerStack` around `model`, which must be on its device, in eval mode, and is taken over."""

    def __init__(self, model: PreTrainedModel, attention: Attention, max_model_len: int) -> None:
        """Raises ValueError, with what is wrong with the architecture, if the model cannot be run layer by layer."""
        config = model.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.max_model_len = max_model_len
        self.dtype, self.device = model.dtype, model.device
        self.parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._attention = attention
        self._model = model
        self._decoder: Any = model.get_decoder()
        self._recorders = _take_out_layers(self._decoder, self.num_layers)
        may_fold = bool(set(_layer_types(config)) - _ATTENTION_TYPES)
        folds = [find_folds(recorder.layer) if may_fold else [] for recorder in self._recorders]
        tokens = torch.arange(_PROOF_TOKENS, device=self.device)
        expected = model(input_ids=tokens[None], use_cache=False).logits[0].float()
        self.vocab_size: int = expected.shape[-1]
        self._folds = [[fold for fold in found if fold.settle()] for found in folds]
        past = _Past(max(0, min(max_model_len, _PROOF_LENGTH) - _PROOF_TOKENS))
        cache = self._make_past(past, config)
        attends = [isinstance(layer, CacheLayerMixin) for layer in cache.layers]
        if any(attends):
            after = {"position_ids": past.length + tokens[None]}  # not every model counts what the cache has
            after_past = model(input_ids=tokens[None], past_key_values=cache, use_cache=True, **after).logits[0].float()
        masks = [
            recorder.arguments[1].get("attention_mask") if each else None  # other masks hide padding, and there is none
            for recorder, each in zip(self._recorders, attends, strict=True)
        ]
        self._mask_windows = [_window_of(mask) for mask in masks]
        for recorder in self._recorders:
            recorder.transparent = False
        model.set_attn_implementation(_NAME)
        self._recorded: Batch | None = None
        heads, windows = self._measure()
        kept = [each for each in heads if each is not None] or [self._heads_of_nothing()]
        self.kv_heads, self.head_dim = max(each.kv_heads for each in kept), max(max(each[1:]) for each in kept)
        for mask, window in zip(masks, windows, strict=True):
            _require_window(mask, window)
        self.states: Sequence[LayerState] = [
            self._state(*each) for each in zip(heads, windows, self._folds, strict=True)
        ]
        ends = list(accumulate(aligned(sum(fold.nbytes for fold in folds)) for folds in self._folds))
        self._places = [slice(*pair) for pair in pairwise([0, *ends])]
        """Of each layer's bytes in a row's state."""
        try:
            self._prove(tokens, expected)
        except ValueError:
            for fold in (fold for folds in self._folds for fold in folds):
                fold.goes_on = False
            self._prove(tokens, expected)
        if any(attends):
            self._prove_far(cache, past.length, tokens, torch.cat((after_past, expected)))

    def _heads_of_nothing(self) -> _Heads:
        """Of a model that only folds. They make a block as large as a part of a state: pools count blocks."""
        total = sum(aligned(fold.nbytes) for folds in self._folds for fold in folds)
        columns = -(-total // (_STATE_PARTS * 2 * _PROOF_BLOCK * self.dtype.itemsize))
        return _Heads(1, aligned(columns), aligned(columns))

    def _make_past(self, past: _Past, config: Any) -> Cache:
        """A cache with the `past` of every layer that attends, as Transformers makes it for this config."""
        if not any(self._folds):
            return Cache(layers=[past] * self.num_layers)
        minimax: Any = getattr(sys.modules[type(self._decoder).__module__], "MiniMaxCache", None)
        if minimax is not None:  # it has states, and layers for those that attend
            own = minimax()
            own.layers = [past] * self.num_layers
            own.linear_cache = [None] * self.num_layers
            return cast("Cache", own)
        cache = DynamicCache(config=config)
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, LinearAttentionAndFullAttentionLayer):
                cache.layers[index] = _PastAndFold(past)
            elif isinstance(layer, CacheLayerMixin):
                cache.layers[index] = past
        return cache

    def _state(self, heads: _Heads | None, window: int | None, folds: Sequence[Fold]) -> LayerState:
        attention = None if heads is None else attention_state(self.kv_heads, self.head_dim, window)
        if attention is not None and not folds:
            return attention
        return FoldState(sum(fold.nbytes for fold in folds), attention)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        self._recorded = None
        self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        return self._recorders[0].received[0]

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        def attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
            states = (F.pad(query, (0, self.head_dim - query.shape[2])), *self._pooled(key, value))
            return self._attention(*states, kv, batch, spec)[..., : value.shape[2]]

        if not self._folds[index]:
            return self._run_layer(index, hidden, batch, attend)
        assert batch.states is not None
        with running(batch, batch.states[:, self._places[index]]):
            return self._run_layer(index, hidden, batch, attend)

    def _pooled(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[tokens, heads, dim]` of any layer as the pool has them, which has room for the widest.
        Narrower ones end in zeros there. Where a layer has fewer heads, each is there several times.
        """
        key, value = (F.pad(x, (0, self.head_dim - x.shape[2])) for x in (key, value))
        copies = self.kv_heads // key.shape[1]
        return (key, value) if copies == 1 else (key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1))

    def _run_layer(self, index: int, hidden: Tensor, batch: Batch, attend: Attend) -> Tensor:
        if self._recorded is not batch:
            # The arguments depend on the positions only, so one recording serves every layer of the batch.
            self.embed(torch.zeros_like(batch.positions), batch.positions)
            self._recorded = batch
        recorder = self._recorders[index]
        args, kwargs = recorder.arguments
        _call.attend, _call.window = attend, self._mask_windows[index]
        output = recorder.layer(hidden[None], *args, **kwargs)
        after: Tensor = output if recorder.behind is None else output[0]
        return after[0]

    def head(self, hidden: Tensor) -> Tensor:
        self._recorded = None
        nothing = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=self.device)
        self._recorders[-1].answer = hidden[None]
        try:
            logits: Tensor = self._model(input_ids=nothing, position_ids=nothing, use_cache=False).logits
        finally:
            self._recorders[-1].answer = None
        return logits[0].float()

    def _measure(self) -> tuple[list[_Heads | None], list[int | None]]:
        """Each layer's heads and window, from what it gives to attention: configs name them in many ways. No heads: the
        layer does not attend, as layers may where some fold.
        """
        heads, windows = list[_Heads | None](), list[int | None]()

        def measure(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
            heads.append(_Heads(key.shape[1], key.shape[2], value.shape[2]))
            windows.append(spec.window)
            return value.new_zeros(*query.shape[:2], value.shape[2])

        batch = make_batch([(0, 1)], [[0]], 1, self.device)
        hidden = self.embed(torch.zeros_like(batch.positions), batch.positions)
        for index in range(self.num_layers):
            self._run_layer(index, hidden, batch, measure)
            if len(heads) == index and any(self._folds):
                heads.append(None)
                windows.append(None)
            if len(heads) != index + 1:
                raise ValueError(f"its layer {index} does not attend through Transformers' attention interface, once")
        counts = {each.kv_heads for each in heads if each is not None}
        if any(max(counts) % count for count in counts):
            raise ValueError(f"its layers have {sorted(counts)} heads of keys and values")
        return heads, windows

    def _prove(self, tokens: Tensor, expected: Tensor) -> None:
        """Compare a prefill in two parts and some decode steps with the logits that the untouched model gave for
        `tokens`.

        Finds layers that depend on more than their arguments: token ids, their own state, each other.
        """
        pool, logits = self._empty_pool(1, self.num_layers), []
        states = None
        for span in [(0, _PART), (_PART, _PART), *((position, 1) for position in range(2 * _PART, _PROOF_TOKENS))]:
            batch = make_batch([span], [[0]], _PROOF_BLOCK, self.device)
            batch = with_new_states(self, batch) if states is None else replace(batch, states=states)
            states = batch.states
            hidden = self.embed(tokens[batch.positions], batch.positions)
            for index in range(self.num_layers):
                hidden = self.layer(index, hidden, batch, pool[:, index])
            logits.append(self.head(hidden))
        self._require_same(torch.cat(logits), expected, "")

    def _prove_far(self, cache: Cache, length: int, tokens: Tensor, expected: Tensor) -> None:
        """Compare a step of two sequences, of which one has had the `length` tokens of `cache` before `tokens` and the
        other nothing, with the logits of the untouched model.

        Finds what depends on a sequence's length, or on that of another one: windows, frequencies, scales.
        """
        blocks = -(-(length + len(tokens)) // _PROOF_BLOCK)
        places = torch.arange(length, device=self.device)
        self._decoder(input_ids=tokens[None], past_key_values=cache, use_cache=True, position_ids=length + tokens[None])
        behind = [recorder.arguments for recorder in self._recorders]
        new = self._recorders[0].received
        spans, tables = [(length, len(tokens)), (0, len(tokens))], [list(range(blocks)), [blocks]]
        batch = with_new_states(self, make_batch(spans, tables, _PROOF_BLOCK, self.device))
        pool = self._empty_pool(blocks + 1, 1)[:, 0]
        hidden = self.embed(tokens.repeat(2), batch.positions)

        def place(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
            """The layer makes keys and values of what the cache has of its past: they go to the pool."""
            for kind, states in enumerate(self._pooled(key[:length], value[:length])):
                pool[places // _PROOF_BLOCK, kind, :, places % _PROOF_BLOCK] = states
            return value.new_zeros(*query.shape[:2], value.shape[2])

        for index, (recorder, (args, kwargs)) in enumerate(zip(self._recorders, behind, strict=True)):
            _call.attend, _call.window = place, None
            if isinstance(cache.layers[index], CacheLayerMixin):
                recorder.layer(new, *args, **kwargs)
            hidden = self.layer(index, hidden, batch, pool)
        self._require_same(self.head(hidden), expected, f" after {length} tokens")

    def _empty_pool(self, blocks: int, layers: int) -> Tensor:
        shape = (blocks, layers, 2, self.kv_heads, _PROOF_BLOCK, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _require_same(self, logits: Tensor, expected: Tensor, where: str) -> None:
        error = float(torch.dist(logits, expected) / expected.norm())
        if not error < TOLERANCE[self.dtype]:
            raise ValueError(f"run layer by layer, its logits are off by {error:.0%}{where}")


def _take_out_layers(decoder: nn.Module, count: int) -> list[_Recorder]:
    """Put a recorder in the place of every layer of `decoder`; the recorders hold the layers."""
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            recorders = [_Recorder(layer) for layer in child]
            setattr(decoder, name, nn.ModuleList(recorders))
            return recorders
    raise ValueError(f"its decoder has no list of {count} layers")


def _window_of(mask: Tensor | None) -> int | None:
    """The window of a layer that has this `mask` `[1, 1, queries, keys]`, where its last query does not see all."""
    if mask is None:
        return None
    seen = int((mask[0, 0, -1] == 0).sum())
    return seen if seen < mask.shape[3] else None


def _require_window(mask: Tensor | None, window: int | None) -> None:
    """Raise ValueError if a layer's `mask` `[1, 1, queries, keys]` is another than that of its `window`; the queries
    are the last keys.
    """
    if mask is None:
        return
    queries, keys = mask.shape[2:]
    behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    expected = (behind >= 0) & (behind < (keys if window is None else window))
    if not torch.equal(mask[0, 0].cpu() == 0, expected):
        raise ValueError(f"its mask is not that of a window of {window} tokens" if window else "its mask is not causal")
