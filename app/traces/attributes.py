"""What a span says of its turn: numbers, names and ids, never a text or a token."""

from opentelemetry.util.types import AttributeValue

from app.domain.activations import CheckpointInfo
from app.domain.memory_map import SessionMemory
from app.domain.values import SamplingParams
from app.logs.about import request_id
from app.messages import TurnFinished
from app.traces import names
from app.traces.base import TurnStart

CHAT_FIELDS = ("messages", "input")
"""What a conversation comes in. Any other field has a text to go on with."""

Attributes = dict[str, AttributeValue]


def operation_of(turn: TurnStart) -> str:
    """The kind of the turn, in a word of the conventions."""
    return names.CHAT if turn.param in CHAT_FIELDS else names.TEXT_COMPLETION


def at_begin(turn: TurnStart) -> Attributes:
    """What is known before the turn runs: samplers may look at it."""
    known: Attributes = {
        names.OPERATION: operation_of(turn),
        names.PROVIDER: names.DJINN,
        names.REQUEST_MODEL: turn.model,
        names.CONVERSATION: turn.session,
        names.MAX_TOKENS: turn.max_tokens,
        names.KV_TIER: tier_of(turn.kv),
    }
    if turn.owner is not None:
        known[names.TENANT] = turn.owner
    return known | by_request() | ({} if turn.sampling is None else _of_sampling(turn.sampling))


def tier_of(kv: SessionMemory) -> str:
    """Where KV is, or is moving."""
    return names.NO_TIER if kv.tier is None else kv.tier.value


def by_request() -> Attributes:
    """The id of the task's request, if there is one."""
    found = request_id()
    return {} if found is None else {names.REQUEST_ID: found}


def at_end(event: TurnFinished, pauses: int) -> Attributes:
    """Why the turn ended, and what it took."""
    usage = event.usage
    return {
        names.FINISH_REASONS: (event.reason.value,),
        names.INPUT_TOKENS: usage.prompt_tokens,
        names.CACHED_TOKENS: usage.cached_tokens,
        names.OUTPUT_TOKENS: usage.completion_tokens,
        names.RECOMPUTED_TOKENS: usage.tokens_recomputed,
        names.PAUSES: pauses,
    }


def of_pause(checkpoint: CheckpointInfo) -> Attributes:
    """Where a turn has paused."""
    where: Attributes = {
        names.PAUSE_LAYER: checkpoint.layer,
        names.PAUSE_FIRST: checkpoint.first,
        names.PAUSE_END: checkpoint.end,
        names.PAUSE_PASS: checkpoint.in_pass.value,
    }
    return where if checkpoint.breakpoint is None else {**where, names.PAUSE_BREAKPOINT: checkpoint.breakpoint}


def _of_sampling(sampling: SamplingParams) -> Attributes:
    return {
        names.SEED: sampling.seed,
        names.TEMPERATURE: sampling.temperature,
        names.TOP_P: sampling.top_p,
        names.TOP_K: sampling.top_k,
        names.PRESENCE_PENALTY: sampling.presence_penalty,
        names.FREQUENCY_PENALTY: sampling.frequency_penalty,
    }
