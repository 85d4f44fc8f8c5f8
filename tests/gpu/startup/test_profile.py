"""What an engine does before its first turn: it shares out memory, of a device with made-up sizes, and compiles."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.values import KVBudget, KVPolicy
from app.gpu.device.hardware import DeviceMemory, allocating
from app.gpu.kernels.attention.base import Batch
from app.gpu.models.base import LayerStack
from app.gpu.startup.kv import DISK_SHARE, KEPT_SHARE, MemoryPlan, budget_blocks, largest_step, plan_memory
from app.machine.budget import DiskRoom
from app.machine.files import GIB
from app.settings import EngineSettings, Settings
from tests.file_sizes import free_on_disks
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel
from tests.gpu.wrapping import WrappedStack
from tests.serving import running_services

pytestmark = pytest.mark.usefixtures("one_thread")


class FakeMemory(DeviceMemory):
    """Memory of `total` bytes, `free` of them; the peaks that are measured are given."""

    def __init__(self, total: int, free: int, peaks: Iterator[int]) -> None:
        self._total, self._free, self._peaks = total, free, peaks

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._free

    def peak_of(self, work: Callable[[], None]) -> int:
        work()
        return next(self._peaks)


class Watched(WrappedStack):
    """Notes its batches, the size of their blocks and how many logits it makes."""

    def __init__(self, stack: LayerStack) -> None:
        super().__init__(stack)
        self.batches: list[Batch] = []
        self.logits: list[int] = []
        self.block_sizes = set[int]()

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        if index == 0:
            self.batches.append(batch)
            self.block_sizes.add(kv.shape[3])
        return super().layer(index, hidden, batch, kv)

    def head(self, hidden: Tensor) -> Tensor:
        self.logits.append(len(hidden))
        return super().head(hidden)


def settings(**given: Any) -> EngineSettings:
    return replace(Settings().engine(), max_step_tokens=24, max_running=6, block_size=4, **given)


def test_what_is_compiled_beforehand_is_what_turns_will_run(tiny_llama: TinyModel) -> None:
    """A token alone, for which CUDA has a product of its own, and a prompt, over blocks of the size that was set."""
    stack = Watched(tiny_llama.stack)
    replace(tiny_llama, stack=stack).engine()
    rows = [row.length for batch in stack.batches for row in batch.rows]
    assert stack.block_sizes == {BLOCK}
    assert [min(rows), max(rows) > 1] == [1, True]
    assert 1 in stack.logits


def test_the_largest_steps_are_run(tiny_llama: TinyModel) -> None:
    stack = Watched(tiny_llama.stack)
    assert largest_step(stack, settings(), FakeMemory(GIB, GIB, iter([300, 200])), stack.dtype) == 300
    prompt, decode = stack.batches
    longest = tiny_llama.stack.max_model_len
    assert [(row.length, row.context) for row in prompt.rows] == [(24, longest)]
    assert decode.decodes == len(decode.rows) == 6
    assert max(row.context for row in decode.rows) == longest
    assert stack.logits == [24, 6]


def test_no_context_is_longer_than_memory_could_hold(tiny_llama: TinyModel) -> None:
    stack, model = Watched(tiny_llama.stack), tiny_llama.stack
    token_bytes = model.num_layers * 2 * model.kv_heads * model.head_dim * 4
    assert largest_step(stack, settings(), FakeMemory(GIB, 10 * token_bytes, iter([200, 300])), stack.dtype) == 300
    prompt, decode = stack.batches
    assert sum(row.length for row in prompt.rows) == 24
    assert max(row.context for row in [*prompt.rows, *decode.rows]) == 10


def test_kv_gets_what_the_rest_leaves(tiny_llama: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        plan = plan_memory(
            tiny_llama.stack, settings(), FakeMemory(80 * GIB, 50 * GIB, iter([GIB, 2 * GIB])), 3 * GIB, torch.float32
        )
    assert plan.kv == 50 * GIB - 2 * GIB - 3 * GIB - settings().upload_bytes - int(80 * GIB * KEPT_SHARE)
    said = caplog.text
    assert all(f"{size:.1f} GiB" in said for size in (80, 2, 3, plan.kv / GIB, plan.kept / GIB))
    assert budget_blocks(settings(kv_dir=None), 1 << 20, plan.kv)[0] == plan.kv >> 20
    with pytest.raises(FieldOutOfRange, match="weights and steps leave") as refused:
        budget_blocks(settings(kv_dir=None), 4096, -5)
    assert refused.value.param == "kv_device"


def test_a_step_that_does_not_fit_beside_the_weights_names_the_setting(tiny_llama: TinyModel) -> None:
    class NoRoom(Watched):
        def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(FieldOutOfRange, match="24 tokens") as refused:
        plan_memory(NoRoom(tiny_llama.stack), settings(), FakeMemory(8 * GIB, GIB, iter([])), 0, torch.float32)
    assert refused.value.param == "max_step_tokens"


def test_a_pool_that_was_asked_for_is_checked(caplog: pytest.LogCaptureFixture) -> None:
    plan = MemoryPlan(total=100 * GIB, free=50 * GIB, step=2 * GIB, graphs=GIB)
    plan.check(plan.kv)
    assert not caplog.records
    plan.check(48 * GIB)
    assert "will run in parts" in caplog.text
    with pytest.raises(FieldOutOfRange, match=r"kv_device is 49\.5 GiB; there is room for 49\.0 GiB"):
        plan.check(int(49.5 * GIB))


def test_budgets_that_are_asked_for_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = settings(kv_device=KVBudget(bytes=1 << 20), kv_host=KVBudget(bytes=1 << 21), kv_dir=None)
    assert budget_blocks(asked, 4096, 1 << 40) == (256, 512, 0)
    sessions = replace(asked, kv_device=KVBudget(sessions=3, tokens=4 * asked.block_size - 1))
    assert budget_blocks(sessions, 4096, None, groups=2, extra_blocks=5)[0] == 3 * (2 * 4 + 5), "states too"
    for on_disk, warnings in ((KVBudget(), 0), (None, 1), (KVBudget(bytes=1 << 20), 2)):
        without_host = replace(asked, kv_host=KVBudget(), kv_disk=on_disk)
        assert budget_blocks(without_host, 4096, 1 << 40, DiskRoom(tmp_path))[2] == 0, "KV goes there over the host"
        assert len(caplog.records) == warnings
    assert "--kv-host" in caplog.text
    assert budget_blocks(replace(asked, kv_host=None, kv_policy=KVPolicy.NONE), 4096, None)[1] == 0


@pytest.mark.parametrize("error", [MemoryError("no"), OSError(12, "Cannot allocate memory"), torch.OutOfMemoryError()])
def test_memory_that_is_not_granted_names_the_setting_and_its_size(error: Exception) -> None:
    wanted = r"kv_host: no memory for 64\.0 GiB"
    with pytest.raises(FieldOutOfRange, match=wanted) as refused, allocating("kv_host", 64 * GIB):
        raise error
    assert refused.value.param == "kv_host"


BLOCK_BYTES = 4096
FREE = 1000 * BLOCK_BYTES


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    free_on_disks(monkeypatch, lambda: FREE)


def disk_blocks(folder: Path, reserve: int, kv_disk: KVBudget | None = None) -> int:
    given = replace(Settings().engine(), kv_device=KVBudget(bytes=1 << 20), kv_disk=kv_disk)
    return budget_blocks(given, BLOCK_BYTES, None, DiskRoom(folder, reserve))[2]


@pytest.mark.usefixtures("free")
def test_kv_has_a_share_of_the_disk_beside_the_reserve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Room that is asked for stays, and waits for the files."""
    assert disk_blocks(tmp_path, 0) == 1000 * DISK_SHARE
    assert disk_blocks(tmp_path, FREE // 2) == 500 * DISK_SHARE
    assert not caplog.records
    assert disk_blocks(tmp_path, FREE + (3 << 20)) == 0
    assert caplog.messages == ["--disk-reserve: the disk lacks 3.0 MiB of it, so no KV goes there"]
    caplog.clear()
    assert disk_blocks(tmp_path, FREE + (3 << 20), KVBudget(bytes=50 * BLOCK_BYTES)) == 50
    assert caplog.messages[0].endswith("so no KV goes there until that is free")
    caplog.clear()
    assert disk_blocks(tmp_path, FREE + 1, KVBudget(bytes=0)) == 0
    assert not caplog.records


@pytest.mark.usefixtures("free")
async def test_files_of_an_earlier_server_are_known_on_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are what gives way to the journal."""
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv/ses_1.safetensors").write_bytes(b"of another model")
    with caplog.at_level(logging.WARNING):
        async with running_services(state_dir=tmp_path, disk_reserve=FREE + 1):
            pass
    assert "KV files that are damaged or of another model or layout: 1" in caplog.text
