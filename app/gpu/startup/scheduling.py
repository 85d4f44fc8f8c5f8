"""The scheduler of an engine, as its device and its settings want it."""

import time

from app.gpu.kv.cache import KVCache
from app.gpu.kv.loan import Borrower, lend_nothing
from app.gpu.kv.placement import Placement
from app.gpu.kv.tiers import KVTiers
from app.gpu.models.base import LayerStack
from app.gpu.planning.drafting import Drafting
from app.gpu.planning.scheduler import Scheduler
from app.gpu.startup.kv import KV
from app.gpu.state.blocks import BlockPool
from app.settings import EngineSettings


def make_scheduler(stack: LayerStack, settings: EngineSettings, kv: KV, draft_tokens: int) -> Scheduler:
    """The scheduler, with the placement and the block pools that it plans with. A row has at most `draft_tokens`
    drafted ones.
    """
    budgets, borrower = kv.budgets, kv.borrower
    cache = KVCache(BlockPool(budgets.device, settings.block_size), BlockPool(budgets.host, settings.block_size))
    tiers = KVTiers(cache, kv.identity.layout.block_bytes, stack.num_layers)
    borrow = lend_nothing if borrower is None else borrower.borrow
    drafting = Drafting(
        cache,
        max_tokens=draft_tokens,
        num_layers=stack.num_layers,
        max_model_len=kv.max_model_len,
        exact_draws=stack.device.type == "cpu",
    )
    return Scheduler(
        Placement(tiers, settings.kv_policy, budgets.disk, time.monotonic, borrow),
        drafting,
        num_layers=stack.num_layers,
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
        shared_prompt_tokens=-(-settings.max_step_tokens // _steps_shared(stack, borrower)),
        shared_rows=_shared_rows(settings, stack, borrower),
        prompts_rest=stack.device.type == "cpu" and borrower is None,  # elsewhere a step costs much without them too
    )


def _steps_shared(stack: LayerStack, borrower: Borrower | None) -> int:
    """What part of a step prompts have while there are other turns: the inverse. On a CPU nearly all of a step's time
    goes with its tokens. On a GPU the weights are read in each. Streamed weights are a sweep, whatever it computes.
    """
    if borrower is not None:
        return 1
    return 4 if stack.device.type == "cpu" else 2


def _shared_rows(settings: EngineSettings, stack: LayerStack, borrower: Borrower | None) -> int:
    """How many turns of one tenant decode in a step while others have turns: fewer than it may have, where each row
    makes the step longer.
    """
    if borrower is not None or stack.device.type != "cpu":
        return settings.max_running
    return max(16, settings.max_step_tokens // 16)
