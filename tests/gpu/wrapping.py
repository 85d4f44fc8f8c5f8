"""A model behind which another one runs, for tests that look at what passes or get in its way."""

from torch import Tensor

from app.gpu.kernels.attention.base import Batch
from app.gpu.models.base import LayerStack


class WrappedStack:
    """A `LayerStack` that is `stack`."""

    def __init__(self, stack: LayerStack) -> None:
        self._stack = stack
        self.num_layers, self.hidden_size, self.vocab_size = stack.num_layers, stack.hidden_size, stack.vocab_size
        self.kv_heads, self.head_dim, self.max_model_len = stack.kv_heads, stack.head_dim, stack.max_model_len
        self.states = stack.states
        self.dtype, self.device, self.parameter_bytes = stack.dtype, stack.device, stack.parameter_bytes
        self.points, self.unembed, self.head_in_parts = stack.points, stack.unembed, stack.head_in_parts
        self.toward, self.written = stack.toward, stack.written

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return self._stack.embed(token_ids, positions)

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        if self.device.type == "cpu":  # programs import Numba, which a machine with a GPU need not have
            from app.gpu.forward.programs import Marks, NotRecordable

            if isinstance(batch.taps, Marks):
                raise NotRecordable("a program would pass by what stands before the model")
        return self._stack.layer(index, hidden, batch, kv)

    def normed(self, hidden: Tensor) -> Tensor:
        return self._stack.normed(hidden)

    def head(self, hidden: Tensor) -> Tensor:
        return self._stack.head(hidden)
