"""Whether and how a model's layers are cut over several processes."""

import torch

from app.domain.errors import FieldOutOfRange
from app.gpu.device.choice import choose_kv_dtype
from app.gpu.models import require_shards
from app.gpu.ranks.leader import Die, Ranks
from app.gpu.ranks.orders import Load
from app.gpu.startup.products import attends_in_bfloat16, choose_products
from app.logs.formats import configured
from app.model_store.resolve import ResolvedModel
from app.settings import EngineSettings


def start_ranks(
    model: ResolvedModel, settings: EngineSettings, device: torch.device, dtype: torch.dtype, die: Die
) -> Ranks | None:
    """The other ranks, which begin to load their parts; None if the setting is 1. Raises FieldOutOfRange for a model or
    a setting that ranks are not for.
    """
    count = settings.tensor_parallel
    if count == 1:
        return None
    require_shards(model, count)
    _require_settings(settings)
    devices = _devices(device, count)
    threads = max(1, torch.get_num_threads() // count)
    if device.type == "cpu":
        torch.set_num_threads(threads)
    products, kv_dtype = choose_products(settings, model, device, dtype), choose_kv_dtype(settings.kv_dtype, dtype)
    own: int = model.config.get_text_config().max_position_embeddings
    ranks = Ranks(count, device, die)
    ranks.load(
        lambda rank: Load(
            model=model,
            rank=rank,
            ranks=count,
            device=devices[rank],
            dtype=dtype,
            products=products,
            attend_in_bfloat16=attends_in_bfloat16(model, products),
            batch_invariant=settings.batch_invariant,
            max_model_len=settings.max_model_len or own,
            block_size=settings.block_size,
            kv_dtype=kv_dtype,
            threads=threads,
            log=configured(),
        )
    )
    return ranks


def _require_settings(settings: EngineSettings) -> None:
    """Raise FieldOutOfRange for what needs all of the model in one process."""
    if settings.weights_device is not None:
        raise FieldOutOfRange(
            "weights_device must be auto with tensor_parallel: each rank keeps its part of the weights",
            param="weights_device",
        )
    if settings.cuda_graphs:
        raise FieldOutOfRange(
            "cuda_graphs must not be set with tensor_parallel: steps of several ranks are not recorded",
            param="cuda_graphs",
        )


def _devices(device: torch.device, count: int) -> list[torch.device]:
    """That of each rank: from `device` on. Raises FieldOutOfRange if there are too few."""
    if device.type == "cpu":
        return [device] * count
    first, found = device.index or 0, torch.cuda.device_count()
    if first + count > found:
        raise FieldOutOfRange(
            f"tensor_parallel must be between 1 and {found - first}: this machine has {found} CUDA devices, and the "
            f"first of the ranks has cuda:{first}; got {count}",
            param="tensor_parallel",
        )
    return [torch.device("cuda", first + rank) for rank in range(count)]
