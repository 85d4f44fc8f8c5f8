"""Tiny models that several files test with."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import TinyModel, make_tiny
from tests.gpu.kernels.attention.reference import ReferenceAttention

if find_spec("triton") is not None and not torch.cuda.is_available():
    from tests.gpu.interpreting import patch_once_for_each_launch

    patch_once_for_each_launch()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch with one thread: a second one only slows models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def kv_dtype() -> str:
    """As what engines keep KV, and oracles with them. Files that test several have a fixture of their own."""
    return "auto"


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies tiles with NumPy's BLAS, which on some processors sums a row by its place among
    the others. Here each row is summed alike, as on a device.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(builder: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
        products = np.einsum("ik,kj->ij", a.data, b.data, dtype=total.data.dtype)
        return TensorHandle(products + total.data, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """4 layers."""
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def driver(tiny_llama: TinyModel) -> BreakDriver:
    return BreakDriver(tiny_llama.engine())


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """12 layers, as many as GPT-2 has."""
    return make_tiny("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def torch_gpt2(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """3 layers, all of it in PyTorch: it needs no Numba, and what reads another place than it should reads no foreign
    memory.
    """
    return make_tiny("gpt2-three-layers", tmp_path_factory.mktemp("gpt2"), attention=ReferenceAttention())


@pytest.fixture(scope="session")
def scaled_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The shape of Llama 2 7B: all of its 32 layers, a thousandth of their weights."""
    return make_tiny("llama-2-7b-scaled", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_mistral(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """32 layers, as many as Mistral 7B has."""
    return make_tiny("mistral", tmp_path_factory.mktemp("mistral"))
