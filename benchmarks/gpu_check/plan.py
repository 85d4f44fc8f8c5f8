"""How much is measured, and of what: on a GPU with 80 GB, on a CPU, in a minute, and under the profiler. Sizes in
bytes, tokens. A target that is None is none.
"""

from dataclasses import dataclass, replace

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Plain copies of each of `sizes`, and of `memory_bytes` within the device's memory."""

    sizes: tuple[int, ...]
    memory_bytes: int
    rounds: int


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """Sessions of `tokens` tokens leave the device and come back, beside plain copies of `plain_bytes`. With `turns`
    also the first tokens of turns of sessions that were away.
    """

    model: str
    tokens: int
    device_tokens: int
    plain_bytes: int
    rounds: int
    turns: bool = False


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """Sessions of `tokens` tokens stand after each of `layers`, counted from 1; recomputing must lose from
    `recompute_loses_from` on.
    """

    model: str
    tokens: int
    device_tokens: int
    layers: tuple[int, ...]
    recompute_loses_from: int
    rounds: int
    of_offload: float | None = 1.05


@dataclass(frozen=True, slots=True)
class BreakpointPlan:
    """`restores` pauses in decode, and in a prompt of `prefill_tokens`; `rounds` in which `width` sessions decode
    `steps` tokens of each kind.
    """

    model: str
    width: int
    prompt_tokens: int
    prefill_tokens: int
    restores: int
    steps: int
    rounds: int
    restored_ms: float = 1.3
    unarmed: float = 1.0024


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Each of `batches` decodes `tokens` tokens after a prompt of `prompt_tokens`, `rounds` times."""

    model: str
    prompt_tokens: int
    tokens: int
    batches: tuple[int, ...]
    rounds: int
    memory_bytes: int
    of_limit: float | None = 0.8
    beside_transformers: bool = True


@dataclass(frozen=True, slots=True)
class SessionsPlan:
    """Sessions that have a turn of `prompt` tokens and another of `more`, each with a `reply`, where the device holds
    `on_device` of them and the host `on_host`. `checked` are answered once more, alone.
    """

    model: str
    sessions: int
    on_device: int
    on_host: int
    prompt: int
    more: int
    reply: int
    checked: int

    @property
    def context(self) -> int:
        """Tokens of a session at its end."""
        return self.prompt + self.more + 2 * self.reply


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """A model of that shape with `layers` layers, each element of `element_bytes`, of which the device has `budget`
    bytes. Each of `batches` shares out `prompt` tokens and generates `tokens` a session, `rounds` times, beside plain
    copies of `plain_bytes`; Accelerate generates `offload_tokens`. On a CPU the smallest batch also waits for the disk.
    """

    model: str
    layers: int
    element_bytes: int
    budget: int
    prompt: int
    tokens: int
    batches: tuple[int, ...]
    rounds: int
    plain_bytes: int
    offload_tokens: int


@dataclass(frozen=True, slots=True)
class DensityPlan:
    """The load of `loadgen density`, with its names; `kv_device` and `kv_host` as `djinn serve` takes them."""

    model: str
    kv_device: str
    kv_host: str
    agents: int
    rate: float
    system_tokens: int
    context: int
    turns: int
    resume_tokens: int
    completion_tokens: int
    think: tuple[float, float]
    time_scale: float
    seed: int = 1


@dataclass(frozen=True, slots=True)
class BesideVllmPlan:
    """Batches, then agents on servers whose devices have room for `kv_tokens`; vLLM's has `offload_gib` of the host."""

    decode: DecodePlan
    agents: DensityPlan
    kv_tokens: int
    offload_gib: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All stages. `has_targets`: whether the figures are of the machine that the targets are for."""

    name: str
    device: str
    has_targets: bool
    copies: CopyPlan
    swap: SwapPlan
    resume: ResumePlan
    breakpoints: BreakpointPlan
    decode: DecodePlan
    sessions: SessionsPlan
    streaming: StreamPlan
    density: DensityPlan
    beside_vllm: BesideVllmPlan


_LARGE, _SMALL, _TINY = "random:llama-2-13b", "random:llama-2-7b", "random:tiny-llama"
_BESIDE = "random:llama-3-8b"
_LARGEST = "random:llama-3-70b"
"""Streaming is for models with such layers and such a vocabulary."""

_AGENTS = DensityPlan(
    _SMALL,
    kv_device="20x1024",
    kv_host="60x1728",
    agents=80,
    rate=0.2,
    system_tokens=128,
    context=1024,
    turns=6,
    resume_tokens=64,
    completion_tokens=64,
    think=(10.0, 20.0),
    time_scale=0.15,
)

FULL = Plan(
    name="full",
    device="cuda",
    has_targets=True,
    copies=CopyPlan(tuple(MIB << power for power in (0, 2, 4, 6, 8, 10)), memory_bytes=4 << 30, rounds=5),
    swap=SwapPlan(_LARGE, tokens=4000, device_tokens=4096, plain_bytes=1 << 30, rounds=8),
    resume=ResumePlan(
        _LARGE, tokens=2048, device_tokens=2304, layers=(1, 10, 20, 30, 40), recompute_loses_from=10, rounds=5
    ),
    breakpoints=BreakpointPlan(
        _SMALL, width=8, prompt_tokens=64, prefill_tokens=2048, restores=100, steps=48, rounds=24
    ),
    decode=DecodePlan(_SMALL, prompt_tokens=128, tokens=64, batches=(1, 8, 32, 128), rounds=2, memory_bytes=4 << 30),
    sessions=SessionsPlan(_LARGE, sessions=50, on_device=20, on_host=37, prompt=2048, more=128, reply=32, checked=10),
    streaming=StreamPlan(
        _LARGEST,
        layers=33,
        element_bytes=2,
        budget=10**10,
        prompt=1024,
        tokens=5,
        batches=(1, 8, 32),
        rounds=3,
        plain_bytes=1 << 30,
        offload_tokens=3,
    ),
    density=_AGENTS,
    beside_vllm=BesideVllmPlan(
        DecodePlan(_BESIDE, prompt_tokens=128, tokens=64, batches=(1, 8, 32, 128), rounds=2, memory_bytes=4 << 30),
        replace(_AGENTS, model=_BESIDE),
        kv_tokens=20 * 1024,
        offload_gib=16,
    ),
)
"""For one GPU with 80 GB and 128 GiB of host memory, of which a host tier takes up to half."""

_FEW_AGENTS = DensityPlan(
    _TINY,
    kv_device="2x96",
    kv_host="6x96",
    agents=4,
    rate=2.0,
    system_tokens=16,
    context=64,
    turns=2,
    resume_tokens=8,
    completion_tokens=4,
    think=(1.0, 2.0),
    time_scale=0.2,
)

TINY = Plan(
    name="tiny",
    device="cpu",
    has_targets=False,
    copies=CopyPlan((MIB >> 2, MIB), memory_bytes=MIB, rounds=2),
    swap=SwapPlan(_TINY, tokens=480, device_tokens=512, plain_bytes=MIB, rounds=2),
    resume=ResumePlan(_TINY, tokens=256, device_tokens=320, layers=(1, 4), recompute_loses_from=4, rounds=1),
    breakpoints=BreakpointPlan(_TINY, width=3, prompt_tokens=16, prefill_tokens=64, restores=4, steps=6, rounds=2),
    decode=DecodePlan(_TINY, prompt_tokens=16, tokens=8, batches=(1, 4), rounds=1, memory_bytes=MIB),
    sessions=SessionsPlan(_TINY, sessions=6, on_device=2, on_host=7, prompt=64, more=16, reply=4, checked=2),
    streaming=StreamPlan(
        _TINY,
        layers=6,
        element_bytes=4,
        budget=450_000,
        prompt=64,
        tokens=6,
        batches=(1, 4),
        rounds=2,
        plain_bytes=MIB,
        offload_tokens=3,
    ),
    density=_FEW_AGENTS,
    beside_vllm=BesideVllmPlan(
        DecodePlan(_TINY, prompt_tokens=16, tokens=8, batches=(1, 4), rounds=1, memory_bytes=MIB),
        _FEW_AGENTS,
        kv_tokens=2 * 96,
        offload_gib=1,
    ),
)

_HERE = "random:smollm2-135m"
CPU = replace(
    TINY,
    name="cpu",
    has_targets=True,
    copies=CopyPlan((MIB, 64 * MIB), memory_bytes=256 * MIB, rounds=5),
    swap=SwapPlan(_HERE, tokens=1024, device_tokens=1152, plain_bytes=64 * MIB, rounds=20, turns=True),
    resume=ResumePlan(_HERE, 1024, 1280, layers=(1, 8, 15, 23, 30), recompute_loses_from=1, rounds=5, of_offload=None),
    breakpoints=BreakpointPlan(
        _HERE, 16, 64, prefill_tokens=512, restores=200, steps=16, rounds=40, restored_ms=2.0, unarmed=1.01
    ),
    decode=DecodePlan(_HERE, 128, 64, batches=(1, 8, 32), rounds=2, memory_bytes=256 * MIB, of_limit=None),
    sessions=SessionsPlan(_HERE, sessions=32, on_device=8, on_host=28, prompt=480, more=480, reply=32, checked=4),
    streaming=StreamPlan(
        _HERE,
        layers=30,
        element_bytes=4,
        budget=89_653_248,
        prompt=1024,
        tokens=32,
        batches=(1, 8, 32),
        rounds=5,
        plain_bytes=64 * MIB,
        offload_tokens=8,
    ),
)
"""For two cores. A sixth of the weights' 538 MB fits."""

PLANS = {plan.name: plan for plan in (FULL, CPU, TINY)}


def profiled(plan: Plan) -> Plan:
    """The same work as seldom as it can be done: a trace holds every operator."""
    return replace(
        plan,
        swap=replace(plan.swap, rounds=1),
        resume=replace(plan.resume, layers=plan.resume.layers[len(plan.resume.layers) // 2 :][:1], rounds=1),
        breakpoints=replace(plan.breakpoints, restores=3, steps=4, rounds=1),
        decode=replace(plan.decode, tokens=8, rounds=1, beside_transformers=False),
        sessions=replace(plan.sessions, reply=2, checked=0),
        streaming=replace(plan.streaming, batches=plan.streaming.batches[:1], rounds=1),
    )
