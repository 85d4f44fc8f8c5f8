"""Any other decoder, driven through its own Transformers modules: general, and slower than a family of ours.

The decoder's layers are taken out and replaced by recorders. The model's own forward then does all that lies around the
layers (embedding and its scale, rotary tables, final norm, logit scaling) and hands each recorder the arguments that
its layer wants. Djinn's attention stands behind Transformers' attention interface. Modules that attend by themselves
run row by row, over what is in Djinn's pages (`models.paging`). Whether that is all there is to the architecture is
not assumed but proved when it is loaded (`models.proof`).

A module that folds tokens into a state (`models.folding`) runs row by row, each from its own state.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, KVSharingDict
from transformers.initialization import no_init_weights

from app.domain.points import Point, Points, PointShape, around_layers
from app.gpu.device.hardware import is_out_of_memory
from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch, make_batch
from app.gpu.models.base import require_fixed_rope
from app.gpu.models.folding import Fold, find_folds, running, settle
from app.gpu.models.hooks import Hooks, find_hooks, told
from app.gpu.models.paging import NAME, SharedKV, enter_layer, read_pages, row_cache, row_of, write_pages
from app.gpu.models.parts import attention_points
from app.gpu.models.proof import LENGTH, TOKENS, Past, make_past, prove, prove_far, require_window, window_of_mask
from app.gpu.state.checkpoints import InParts
from app.gpu.state.layer_state import FoldState, LayerState, SharedState, aligned, attention_state
from app.gpu.weights.checkpoint import QuantizedFolder
from app.gpu.weights.source import RandomWeights, TensorFormat, require_finite
from app.model_store.install import BrokenModel
from app.model_store.resolve import ResolvedModel

logger = logging.getLogger(__name__)

_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_LAYER_TYPES = {*_ATTENTION_TYPES, "linear_attention", "conv", "hybrid", "dummy", "moe", "mlp"}
_STATE_PARTS, _STATE_BLOCK = 32, 16
"""About so many blocks of so many places have the state of a sequence, where nothing is kept for each token."""


def load_transformers_stack(
    model: ResolvedModel, device: torch.device, dtype: torch.dtype, attention: Attention, max_model_len: int
) -> TransformersStack:
    """Raises ValueError, with the reason, for an architecture that cannot be run layer by layer."""
    text = model.config.get_text_config()
    require_fixed_rope(text)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError("it has an encoder, and Djinn serves decoders alone")
    others = set(_layer_types(text)) - _LAYER_TYPES
    if others:
        raise ValueError(f"it has layers of type {', '.join(sorted(others))}")
    modules = _load_modules(model, device, dtype).eval().requires_grad_(False)
    return TransformersStack(modules, attention, max_model_len)


def _load_modules(model: ResolvedModel, device: torch.device, dtype: torch.dtype) -> Any:
    """With random weights, or through Transformers' own loader: it knows the checkpoints whose names differ from the
    modules'. Tensors that are quantized are dequantized before it sees them.
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
    quantization, state = getattr(config, "quantization_config", None), None
    if quantization is not None:
        state = QuantizedFolder(folder, quantization, TensorFormat(torch.device("cpu"), dtype)).dense()
        del config.quantization_config
    if state is not None:
        auto = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # the automatic class reads folders only
    try:
        modules, report = auto.from_pretrained(
            folder if state is None else None,
            state_dict=state,
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
    modules = modules.to(device)
    for name, parameter in modules.named_parameters():
        require_finite(name, parameter, folder)
    return modules


class _Recorder(nn.Module):
    """Stands in for a layer: keeps what it was called with, and passes `answer`, or else its input, on. While it is
    `transparent` it passes on what the layer answers. Some layers answer with a tuple that begins with that.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.received: Tensor
        self.arguments: Arguments
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


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a layer, behind its input."""


class TransformersStack:
    """A `LayerStack` around `model`, which must be on its device, in eval mode, and is taken over."""

    def __init__(self, model: PreTrainedModel, attention: Attention, max_model_len: int) -> None:
        """Raises ValueError, with what is wrong with the architecture, if the model cannot be run layer by layer."""
        config = model.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self.max_model_len = max_model_len
        self.dtype, self.device = model.dtype, model.device
        self.parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._attention = attention
        self._model = model
        self._decoder, self._recorders = _take_out_layers(model, self.num_layers)
        takes_state = "state" in inspect.signature(self._decoder.forward).parameters
        may_fold = takes_state or bool(set(_layer_types(config)) - _ATTENTION_TYPES)
        folds = [find_folds(recorder.layer) if may_fold else [] for recorder in self._recorders]
        tokens = torch.arange(TOKENS, device=self.device)
        expected = model(input_ids=tokens[None], use_cache=takes_state).logits[0].float()
        self.vocab_size: int = expected.shape[-1]
        streams = self._recorders[0].received
        self._streams = len(streams) if streams.dim() == 4 else 1
        self.hidden_size: int = self._streams * streams.shape[-1]
        self._folds = [settle(found) for found in folds]
        past = Past(max(0, min(max_model_len, LENGTH) - TOKENS))
        cache = make_past(past, config, self._decoder, self.num_layers, folds=any(self._folds))
        attends = [isinstance(layer, CacheLayerMixin) for layer in cache.layers]
        if any(attends):
            after = {"position_ids": past.length + tokens[None]}  # not every model counts what the cache has
            after_past = model(input_ids=tokens[None], past_key_values=cache, use_cache=True, **after).logits[0].float()
        masks = [
            recorder.arguments[1].get("attention_mask") if each else None  # other masks hide padding, and there is none
            for recorder, each in zip(self._recorders, attends, strict=True)
        ]
        for recorder in self._recorders:
            recorder.transparent = False
        self._recorded: tuple[Tensor, Tensor | None] | None = None
        """Positions and token ids of the batch that `_given` is for."""
        self._given: list[list[Arguments]] = []
        """Of each part of a batch that runs together, all rows or one: the arguments of every layer."""
        self._by_rows = self._reads_tokens = self._finds_hooks = False
        self._hooks: list[Hooks] = [{}] * self.num_layers
        self._between = self._measure_between(tokens)
        try:
            model.set_attn_implementation(NAME)
            self._mask_windows = [window_of_mask(mask) for mask in masks]
            windows = self._measure()
            for mask, window in zip(masks, windows, strict=True):
                require_window(mask, window)
        except Exception as reason:  # of whatever kind: another attention is not what the modules expect
            if is_out_of_memory(reason):
                raise
            logger.info("its attention runs row by row: %s", reason)
            self._by_rows, self._mask_windows = True, [None] * self.num_layers
            model.set_attn_implementation("eager")
            windows = self._measure()
        self.states: Sequence[LayerState] = [self._state(*each) for each in enumerate(windows)]
        ends = list(accumulate(aligned(sum(fold.nbytes for fold in folds)) for folds in self._folds))
        self._places = [slice(*pair) for pair in pairwise([0, *ends])]
        """Of each layer's bytes in a row's state."""
        self._finds_hooks = True
        try:
            prove(self, self._sources, tokens, expected)
        except ValueError:
            for fold in (fold for folds in self._folds for fold in folds):
                fold.goes_on = False
            prove(self, self._sources, tokens, expected)
        self._finds_hooks = False
        self.points = self._points()
        self.head_in_parts = None
        if any(attends):
            new, behind = self._record_behind(cache, tokens, past.length + tokens)

            def look_back(index: int) -> tuple[Tensor, Tensor]:
                return self._look_back(index, new, behind[index], past)

            prove_far(self, self._sources, past.length, look_back, tokens, torch.cat((after_past, expected)))

    def _heads_of_nothing(self) -> _Heads:
        """Of a model that only folds. They make a block as large as a part of a state: pools count blocks."""
        total = sum(aligned(fold.nbytes) for folds in self._folds for fold in folds)
        columns = -(-total // (_STATE_PARTS * 2 * _STATE_BLOCK * self.dtype.itemsize))
        return _Heads(1, aligned(columns), aligned(columns))

    def _state(self, index: int, window: int | None) -> LayerState:
        if self._sources[index] != index:
            return SharedState(self._sources[index])
        folds, kept = self._folds[index], self._heads[index] is not None
        attention = attention_state(self.kv_heads, self.head_dim, window) if kept else None
        if attention is not None and not folds:
            return attention
        return FoldState(sum(fold.nbytes for fold in folds), attention)

    def _sizes(self, index: int) -> Mapping[str, tuple[int, int]]:
        """Heads of queries, keys and values, and their widths."""
        heads, config = self._heads[index], self._model.config.get_text_config()
        if heads is None or self._sources[index] != index:
            return {}
        keys = {"k_proj": (heads.kv_heads, heads.key_dim), "v_proj": (heads.kv_heads, heads.value_dim)}
        return keys | {"q_proj": (getattr(config, "num_attention_heads", 0), heads.key_dim)}

    def _points(self) -> Points:
        """Those around layers, those that hooks reach, and those of attention where all rows attend together."""
        found = dict(around_layers(self.num_layers, self.hidden_size, self.vocab_size))
        inside = list[Mapping[Point, PointShape]]()
        for index, (hooks, heads) in enumerate(zip(self._hooks, self._heads, strict=True)):
            here = {point: hook.shape for point, hook in hooks.items()}
            if numbers := sum(fold.count for fold in self._folds[index]):
                here[Point.STATE] = PointShape(numbers)
            count = self._sizes(index).get("q_proj", (0, 0))[0]
            if heads is not None and count and not self._by_rows:
                here |= attention_points(count, heads.kv_heads, heads.key_dim) | here
                here |= {Point.Z: PointShape(count * heads.value_dim, count)}
                here |= {Point.V: PointShape(heads.kv_heads * heads.value_dim, heads.kv_heads)}
                for point in {Point.Q, Point.K} - set(hooks):
                    del here[point]
            inside.append(here)
        found.update((point, tuple(each.get(point) for each in inside)) for point in dict.fromkeys(chain(*inside)))
        return found

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        self._recorded = None
        self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        return self._packed(self._recorders[0].received)

    def _packed(self, hidden: Tensor) -> Tensor:
        """What a layer takes or answers, `[1, tokens, width]` or `[streams, 1, tokens, width]`, as `[tokens,
        hidden_size]`.
        """
        return hidden[0] if self._streams == 1 else hidden[:, 0].transpose(0, 1).flatten(1)

    def _unpacked(self, hidden: Tensor) -> Tensor:
        """The reverse."""
        if self._streams == 1:
            return hidden[None]
        return hidden.reshape(len(hidden), self._streams, -1).transpose(0, 1)[:, None].contiguous()

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        # The arguments depend on the tokens and positions only, so one recording serves every layer of the batch.
        if self._recorded is None or any(one is not two for one, two in zip(self._recorded, _what(batch), strict=True)):
            self._given = self._record(batch)
            self._recorded = _what(batch)
        parts, taps = [batch], batch.taps
        if self._by_rows:
            parts = [row_of(batch, row) for row in range(len(batch.rows))]
            if taps is not None:
                parts = [replace(part, taps=taps.of_row(row)) for row, part in enumerate(parts)]
        outputs = list[Tensor]()
        inputs = hidden.split([len(part.positions) for part in parts])
        for part, of_part, arguments in zip(parts, inputs, self._given, strict=True):
            self._enter(index, part, kv)
            with told(self._hooks[index], part.taps):
                if not self._folds[index]:
                    outputs.append(self._run_layer(index, of_part, arguments[index]))
                    continue
                assert part.states is not None
                states = part.states[:, self._places[index]]
                with running(part, states):
                    outputs.append(self._run_layer(index, of_part, arguments[index]))
                if part.taps is not None and Point.STATE in part.taps.points:
                    part.taps.state(partial(_numbers, self._folds[index]), states)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _record(self, batch: Batch) -> list[list[Arguments]]:
        """The arguments of every layer, for all rows together or for each by itself."""
        token_ids = torch.zeros_like(batch.positions) if batch.token_ids is None else batch.token_ids
        if not self._by_rows or not batch.rows:
            self.embed(token_ids, batch.positions)
            if not batch.rows and (self._by_rows or self._reads_tokens):
                raise ValueError("its layers need to know their rows or tokens, which a graph does not")
            return [self._arguments()]
        given = list[list[Arguments]]()
        for row in batch.rows:
            tokens = slice(row.start, row.start + row.length)
            cache = row_cache(row.context - row.length, self.num_layers)
            self._record_behind(cache, token_ids[tokens], batch.positions[tokens])
            given.append(self._arguments())
        return given

    def _record_behind(self, cache: Cache, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, list[Arguments]]:
        """What the first layer takes, `[tokens, hidden_size]`, and the arguments of every layer, behind what is in
        `cache`.
        """
        given = {"position_ids": positions[None], "past_key_values": cache, "use_cache": True}
        self._decoder(input_ids=token_ids[None], **given)
        return self._packed(self._recorders[0].received), [recorder.arguments for recorder in self._recorders]

    def _look_back(self, index: int, hidden: Tensor, arguments: Arguments, past: Past) -> tuple[Tensor, Tensor]:
        """The keys and values that layer `index` sees of the `past` and its own tokens, as the pool has them."""
        seen = list[tuple[Tensor, Tensor]]()

        def attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
            """The layer may make them of what its cache has."""
            seen.append((key, value))
            return value.new_zeros(*query.shape[:2], value.shape[2])

        enter_layer(attend, lambda key, value: (key, value))
        self._run_layer(index, hidden, arguments)
        if self._by_rows:
            seen.append((past.seen[0][0].transpose(0, 1), past.seen[1][0].transpose(0, 1)))
        return self._pooled(*seen[0])

    def _arguments(self) -> list[Arguments]:
        """What the recorders have been called with. What layers would pass on to each other is in the pages."""
        return [
            (args, {name: SharedKV() if isinstance(given, KVSharingDict) else given for name, given in kwargs.items()})
            for args, kwargs in (recorder.arguments for recorder in self._recorders)
        ]

    def _enter(self, index: int, batch: Batch, kv: Tensor) -> None:
        """Let layer `index` find the keys and values of `batch` in `kv`."""

        def attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
            taps = batch.taps
            if taps is not None:  # modules may give views, of which some share memory
                query, key, value = (each.clone(memory_format=torch.contiguous_format) for each in (query, key, value))
                taps(Point.V, value)
                taps(Point.Q_ROT, query)
                taps(Point.K_ROT, key)
            states = (F.pad(query, (0, self.head_dim - query.shape[2])), *self._pooled(key, value))
            mixed = self._attention(*states, kv, batch, spec)[..., : value.shape[2]]
            if taps is not None:
                mixed = mixed.contiguous()
                taps.pattern(states[0], kv, batch, spec)
                taps(Point.Z, mixed)
            return mixed

        def exchange(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            new = self._pooled(key[0].transpose(0, 1), value[0].transpose(0, 1))
            write_pages(kv, batch.slot_blocks, batch.slot_offsets, *new)
            places = torch.arange(batch.rows[0].context, device=self.device)
            blocks = batch.block_tables[0].long()[places // kv.shape[3]]
            return self._unpooled(index, *read_pages(kv, blocks, places % kv.shape[3], key.dtype))

        def read() -> tuple[Tensor, Tensor]:
            return self._unpooled(index, *read_pages(kv, batch.slot_blocks, batch.slot_offsets, self.dtype))

        enter_layer(attend, exchange, read, self._mask_windows[index])

    def _pooled(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[tokens, heads, dim]` of any layer as the pool has them, which has room for the widest.
        Narrower ones end in zeros there. Where a layer has fewer heads, each is there several times.
        """
        key, value = (F.pad(x, (0, self.head_dim - x.shape[2])) for x in (key, value))
        copies = self.kv_heads // key.shape[1]
        return (key, value) if copies == 1 else (key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1))

    def _unpooled(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The reverse for layer `index`, `[1, heads, tokens, dim]` each."""
        heads = self._heads[index]
        assert heads is not None
        copies = self.kv_heads // heads.kv_heads
        kept = keys[:, ::copies, : heads.key_dim], values[:, ::copies, : heads.value_dim]
        return kept[0].transpose(0, 1)[None], kept[1].transpose(0, 1)[None]

    def _run_layer(self, index: int, hidden: Tensor, arguments: Arguments) -> Tensor:
        recorder, (args, kwargs) = self._recorders[index], arguments
        given = self._unpacked(hidden)
        if self._finds_hooks and self._streams == 1:
            output, self._hooks[index] = find_hooks(
                recorder.layer, given, lambda: recorder.layer(given, *args, **kwargs), self._sizes(index)
            )
            if not self._by_rows:  # attention tells of values
                self._hooks[index] = {point: hook for point, hook in self._hooks[index].items() if point is not Point.V}
        else:
            output = recorder.layer(given, *args, **kwargs)
        after = self._packed(output if recorder.behind is None else output[0])
        return after if self._between[index] == 1 else after * self._between[index]

    def normed(self, hidden: Tensor) -> Tensor:
        after: Tensor = self._after_layers(self._decoder, hidden).last_hidden_state
        return after[0]

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._after_layers(self._model, hidden).logits
        return logits[0].float()

    def unembed(self, normed: Tensor) -> Tensor:
        def put_in(_decoder: Any, _args: Any, found: Any) -> Any:
            found.last_hidden_state = normed[None]
            return found

        hook = self._decoder.register_forward_hook(put_in)
        try:
            # The layers' output is of no account, and as wide as any.
            return self.head(torch.zeros(len(normed), self.hidden_size, dtype=self.dtype, device=self.device))
        finally:
            hook.remove()

    def toward(self, token_id: int) -> InParts[Tensor]:
        each, found = torch.eye(self.hidden_size, dtype=self.dtype, device=self.device), list[Tensor]()
        zero = self.unembed(torch.zeros_like(each[:1]))[0, token_id]
        for rows in each.split(64):
            found.append(self.unembed(rows)[:, token_id])
            yield None
        return torch.cat(found) - zero

    def written(
        self, index: int, point: Point, parts: Tensor, whole: Tensor, adapters: Sequence[tuple[Any, Any]]
    ) -> Tensor | None:
        return None

    def _after_layers(self, model: Any, hidden: Tensor) -> Any:
        """What a module with all layers in it makes of the last one's output."""
        self._recorded = None
        nothing = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=self.device)
        self._recorders[-1].answer = self._unpacked(hidden)
        try:
            return model(input_ids=nothing, position_ids=nothing, use_cache=False)
        finally:
            self._recorders[-1].answer = None

    def _measure_between(self, tokens: Tensor) -> list[float]:
        """What the decoder multiplies each layer's output with before the next one. Finds out, too, whether layers look
        at token ids.
        """
        positions, factors = torch.arange(len(tokens), device=self.device), list[float]()
        self.embed(tokens, positions)
        before, received = self._arguments(), [recorder.received for recorder in self._recorders]
        for this, following in pairwise(received):
            same = torch.equal(this, following)
            factors.append(1.0 if same else float((this * following).sum() / (this * this).sum()))
            if not torch.allclose(this * factors[-1], following):
                raise ValueError("its decoder does more between layers than to scale their output")
        self.embed(tokens.flip(0), positions)
        pairs = zip(tree_leaves(before), tree_leaves(self._arguments()), strict=True)
        self._reads_tokens = any(isinstance(one, Tensor) and not torch.equal(one, two) for one, two in pairs)
        return [*factors, 1.0]

    def _measure(self) -> list[int | None]:
        """Find each layer's heads, and whose keys and values it reads, from what it gives to attention: configs name
        them in many ways. No heads: the layer has no attention. Returns each layer's window.
        """
        heads, windows, given = list[_Heads | None](), list[int | None](), list[Tensor | None]()

        def measure(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
            heads.append(_Heads(key.shape[1], key.shape[2], value.shape[2]))
            windows.append(spec.window)
            given.append(key)
            return value.new_zeros(*query.shape[:2], value.shape[2])

        def exchange(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            if key.shape[1] != value.shape[1]:
                raise ValueError("it keeps keys and values of unequally many heads")
            new = key[0].transpose(0, 1)
            measure(new, new, value[0].transpose(0, 1), AttentionSpec(1.0))
            return key, value

        batch = make_batch([(0, 1)], [[0]], 1, self.device)
        self._record(batch)
        hidden = self._packed(self._recorders[0].received)
        arguments = [recorder.arguments for recorder in self._recorders]
        for index in range(self.num_layers):
            enter_layer(measure, exchange, window=self._mask_windows[index])
            self._run_layer(index, hidden, arguments[index])
            if len(heads) == index and (self._by_rows or any(self._folds)):
                heads.append(None)
                windows.append(None)
                given.append(None)
            if len(heads) != index + 1:
                raise ValueError(f"its layer {index} does not attend once, to keys and values of its own")
        counts = {each.kv_heads for each in heads if each is not None}
        if any(max(counts) % count for count in counts):
            raise ValueError(f"its layers have {sorted(counts)} heads of keys and values")
        self._heads = heads
        addresses = [index if key is None else key.data_ptr() for index, key in enumerate(given)]
        self._sources = [addresses.index(each) for each in addresses]
        """The layer whose keys and values each reads: mostly its own."""
        kept = [each for each in heads if each is not None] or [self._heads_of_nothing()]
        self.kv_heads, self.head_dim = max(each.kv_heads for each in kept), max(max(each[1:]) for each in kept)
        return windows


def _numbers(folds: Sequence[Fold], states: Tensor) -> Tensor:
    return torch.cat([fold.numbers(states) for fold in folds], dim=1)


def _what(batch: Batch) -> tuple[Tensor, Tensor | None]:
    return batch.positions, batch.token_ids


def _take_out_layers(model: PreTrainedModel, count: int) -> tuple[Any, list[_Recorder]]:
    """The decoder, with a recorder in the place of every layer. The recorders hold the layers."""
    for decoder in (model.get_decoder(), *model.modules()):  # Llama 4 does not tell its decoder
        for name, child in decoder.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                recorders = [_Recorder(layer) for layer in child]
                setattr(decoder, name, nn.ModuleList(recorders))
                return decoder, recorders
    raise ValueError(f"its decoder has no list of {count} layers")
