"""The stages in the order of their importance: a run that is cut short has the first ones.

Their times are what they took on an H200, and some seconds more. Those of `copies`, `vllm` and `cuda_tests` are
estimates: none has run to its end there as a stage.
"""

from dataclasses import dataclass

_ENGINE = ("torch", "transformers", "psutil", "rich", "pydantic", "pydantic_settings")
_HTTP = ("fastapi", "uvicorn", "orjson", "httpx", "httpx_sse", "prometheus_client")


@dataclass(frozen=True, slots=True)
class Stage:
    """`budget_s`: how long it may take; `least_s`: with less than that it is not begun. `needs` are modules that it
    imports. `profiled`: whether it computes in its own process, where a profiler sees it.
    """

    name: str
    title: str
    budget_s: float
    least_s: float
    needs: tuple[str, ...]
    profiled: bool = True

    @property
    def module(self) -> str:
        """Where its `run` is."""
        return f"benchmarks.gpu_check.stages.{self.name}"


STAGES = (
    Stage("doctor", "What `djinn doctor` says", 15, 10, _ENGINE, profiled=False),
    Stage("copies", "Plain copies", 25, 10, ("torch", "numpy"), profiled=False),
    Stage("swap", "Sessions that leave the device and come back", 35, 25, _ENGINE),
    Stage("resume", "Back where a session was", 35, 25, _ENGINE),
    Stage("decode", "Decode beside Transformers and the bytes limit", 90, 35, _ENGINE),
    Stage("breakpoints", "What breakpoints cost", 60, 35, _ENGINE),
    Stage("sessions", "More sessions than the device holds", 75, 50, _ENGINE),
    Stage("weights", "A model larger than its share of the device", 110, 60, (*_ENGINE, "accelerate")),
    Stage("density", "Eighty agents over HTTP", 130, 115, (*_ENGINE, *_HTTP), profiled=False),
    Stage("vllm", "Beside vLLM", 300, 120, (*_ENGINE, *_HTTP), profiled=False),
    Stage("cuda_tests", "CUDA tests", 110, 60, ("torch", "pytest", "pytest_asyncio", "pytest_timeout"), profiled=False),
)
