"""Any other decoder, driven through its own Transformers modules: general, and slower than a stack of its own.

The decoder's layers are taken out and replaced by recorders. The model's own forward then does all that lies around the
layers (embedding and its scale, rotary tables, final norm, logit scaling) and hands each recorder the arguments that
its layer wants. Whether that is all there is to the architecture is not assumed but proved when it is loaded.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch, make_batch
from app.gpu.models.base import TOLERANCE
from app.gpu.models.transformers_attention import NAME, Paged

_PROOF_TOKENS = 8
_PREFILL = 4


class _Recorder(nn.Module):
    """Stands in for a layer: keeps what it was called with, and passes `answer`, or else its input, on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.received: Tensor
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]]
        self.answer: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.received, self.arguments = hidden_states, (args, kwargs)
        return hidden_states if self.answer is None else self.answer

    def __getattr__(self, name: str) -> Any:
        """What the forward reads off a layer, such as `attention_type`, is the layer's own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


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
        self._decoder = _decoder_of(model)
        tokens = torch.arange(_PROOF_TOKENS, device=self.device)
        expected = model(input_ids=tokens[None], use_cache=False).logits[0]
        self.vocab_size: int = expected.shape[-1]
        model.set_attn_implementation(NAME)
        self._recorders = _take_out_layers(self._decoder, self.num_layers)
        self._recorded: Batch | None = None
        self.kv_heads, self.head_dim = self._measure()
        self._prove(tokens, expected)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        self._recorded = None
        self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        return self._recorders[0].received[0]

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        return self._run_layer(index, hidden, Paged(self._attention, batch, kv))

    def _run_layer(self, index: int, hidden: Tensor, paged: Paged) -> Tensor:
        batch = paged.batch
        if self._recorded is not batch:
            # The arguments depend on the positions only, so one recording serves every layer of the batch.
            self.embed(torch.zeros_like(batch.positions), batch.positions)
            self._recorded = batch
        recorder = self._recorders[index]
        args, kwargs = recorder.arguments
        output = recorder.layer(hidden[None], *args, **kwargs, paged=paged)
        if not isinstance(output, Tensor):
            raise ValueError(f"its layers return {type(output).__name__}, not one tensor")
        return output[0]

    def head(self, hidden: Tensor) -> Tensor:
        self._recorded = None
        nothing = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=self.device)
        self._recorders[-1].answer = hidden[None]
        try:
            logits: Tensor = self._model(input_ids=nothing, position_ids=nothing, use_cache=False).logits
        finally:
            self._recorders[-1].answer = None
        return logits[0].float()

    def _measure(self) -> tuple[int, int]:
        """`kv_heads` and `head_dim`, from what every layer gives to attention: configs name them in many ways."""
        shapes: set[tuple[int, ...]] = set()

        def measure(query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec) -> Tensor:
            shapes.update((tuple(key.shape[1:]), tuple(value.shape[1:])))
            return value.new_zeros(*query.shape[:2], value.shape[2])

        batch = make_batch([(0, 1)], [[0]], 1, self.device)
        hidden = self.embed(torch.zeros_like(batch.positions), batch.positions)
        for index in range(self.num_layers):
            self._run_layer(index, hidden, Paged(measure, batch, hidden))
        if len(shapes) != 1:
            raise ValueError(f"its layers have keys and values of several shapes: {sorted(shapes)}")
        kv_heads, head_dim = shapes.pop()
        return kv_heads, head_dim

    def _prove(self, tokens: Tensor, expected: Tensor) -> None:
        """Compare a prefill and some decode steps with the logits that the untouched model gave for `tokens`.

        Finds layers that depend on more than their arguments: token ids, state of their own, each other.
        """
        pool = torch.zeros(
            1, self.num_layers, 2, self.kv_heads, 16, self.head_dim, dtype=self.dtype, device=self.device
        )
        logits = []
        for span in [(0, _PREFILL), *((position, 1) for position in range(_PREFILL, _PROOF_TOKENS))]:
            batch = make_batch([span], [[0]], 16, self.device)
            hidden = self.embed(tokens[batch.positions], batch.positions)
            for index in range(self.num_layers):
                hidden = self.layer(index, hidden, batch, pool[:, index])
            logits.append(self.head(hidden))
        error = float(torch.dist(torch.cat(logits), expected.float()) / expected.float().norm())
        if not error < TOLERANCE[self.dtype]:
            raise ValueError(f"run layer by layer, its logits are off by {error:.0%}")


def _decoder_of(model: Any) -> nn.Module:
    decoder: nn.Module = model.get_decoder()
    return decoder


def _take_out_layers(decoder: nn.Module, count: int) -> list[_Recorder]:
    """Put a recorder in the place of every layer of `decoder`; the recorders hold the layers."""
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            recorders = [_Recorder(layer) for layer in child]
            setattr(decoder, name, nn.ModuleList(recorders))
            return recorders
    raise ValueError(f"its decoder has no list of {count} layers")
