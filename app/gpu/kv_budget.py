"""How many KV blocks each tier gets."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from app.domain import KVBudget, KVPolicy
from app.errors import FieldOutOfRange
from app.settings import EngineSettings

DEVICE_SHARE = {"cpu": 0.25, "cuda": 0.9}
"""Default share of the memory that is free after the weights: a CPU's is also everyone else's."""
HOST_SHARE = 0.25
"""Default share of the free host memory."""
DISK_SHARE = 0.1
"""Default share of the free disk."""


@dataclass(frozen=True, slots=True)
class TierBlocks:
    """Blocks of each tier."""

    device: int
    host: int
    disk: int


def budget_blocks(settings: EngineSettings, device: torch.device, block_bytes: int) -> TierBlocks:
    """Blocks of `block_bytes` bytes for each tier: what the settings say, or else a share of what is free.

    Raises `FieldOutOfRange` unless the device gets at least one. Where KV never leaves the device (policy `none`) the
    lower tiers get none by default.
    """

    def blocks(asked: KVBudget | None, default_bytes: float) -> int:
        budget = KVBudget(bytes=int(default_bytes)) if asked is None else asked
        return budget.blocks(block_bytes, settings.block_size)

    free = psutil.virtual_memory().available
    free_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free
    on_device = blocks(settings.kv_device, free_device * DEVICE_SHARE[device.type])
    if on_device < 1:
        raise FieldOutOfRange(f"kv_device must hold at least one block of {block_bytes} bytes", param="kv_device")
    lower = 0 if settings.kv_policy is KVPolicy.NONE else 1
    on_disk = 0 if settings.kv_dir is None else blocks(settings.kv_disk, _free_disk(settings.kv_dir) * DISK_SHARE)
    return TierBlocks(on_device, lower * blocks(settings.kv_host, free * HOST_SHARE), lower * on_disk)


def _free_disk(folder: Path) -> int:
    """Free bytes where `folder` is, or will be."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(existing).free
