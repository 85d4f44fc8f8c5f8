"""How steps of a loaded model run: layer by layer, as a program, as graphs, or on several ranks."""

from collections.abc import Callable

import torch

from app.gpu.forward.forward import Runner
from app.gpu.forward.graphs import Recorder
from app.gpu.forward.pieces import RunLayers, layer_by_layer
from app.gpu.forward.recording import record_graphs
from app.gpu.kernels.attention.base import make_batch
from app.gpu.kv.pools import KVPool
from app.gpu.models.base import LayerStack
from app.gpu.ranks.layers import LeadingLayers, LeadingStack
from app.gpu.sampling.masks import WORD, apply_mask
from app.gpu.startup.kv import KV
from app.gpu.startup.weights import LoadedModel
from app.settings import EngineSettings

WARM_UP_TOKENS = 32


def make_runner(
    loaded: LoadedModel, settings: EngineSettings, kv: KV, recorder: Recorder | None, on_layer: Callable[[], None]
) -> Runner:
    """What runs the steps of a loaded model. `on_layer` is called before each layer that may take long."""
    stack, limit = loaded.stack, kv.max_model_len
    blocks = -(-limit // settings.block_size)
    graphs = None if recorder is None else record_graphs(stack, kv.pool, settings.max_running, blocks, recorder)
    run_layers = _choose_layers(loaded, settings, kv, on_layer, can_record=recorder is None)
    whole = stack if loaded.ranks is None else LeadingStack(loaded.ranks, stack)
    return Runner(whole, kv.pool, loaded.streams, run_layers, graphs)


def _choose_layers(
    loaded: LoadedModel, settings: EngineSettings, kv: KV, on_layer: Callable[[], None], *, can_record: bool
) -> RunLayers:
    """How layers run: recorded where that saves time and their weights stay where they are, and here."""
    pool = kv.pool
    if loaded.ranks is not None:
        return LeadingLayers(loaded.ranks, layer_by_layer(loaded.stack, pool, on_layer))
    if can_record and loaded.streams.on_host and loaded.streamed is None:
        from app.gpu.forward.programs import RecordedLayers  # imports Numba, which only a CPU needs

        return RecordedLayers(loaded.stack, pool, kv.max_model_len, settings.max_step_tokens, on_layer)
    return layer_by_layer(loaded.stack, pool, on_layer)


@torch.inference_mode()
def warm_up(stack: LayerStack, block_size: int, kv_dtype: torch.dtype) -> None:
    """Run a decode row, alone and beside a prompt, through one layer, and mask logits. Then no client waits for kernels
    to be compiled, and the memory of loaded kernels is not counted as that of a step or a graph.
    """
    blocks = -(-WARM_UP_TOKENS // block_size)
    both = make_batch([(0, 1), (0, WARM_UP_TOKENS)], [[0], range(1, blocks + 1)], block_size, stack.device)
    pool = KVPool(stack, blocks + 1, block_size, dtype=kv_dtype).layer(0)
    for batch in (both, make_batch([(0, 1)], [[0]], block_size, stack.device)):
        hidden = stack.embed(torch.zeros_like(batch.positions), batch.positions)
        logits = stack.head(stack.layer(0, hidden, batch, pool))
    apply_mask(
        logits,
        torch.zeros(1, dtype=torch.int64, device=stack.device),
        torch.zeros((1, -(-stack.vocab_size // WORD)), dtype=torch.int32, device=stack.device),
    )
