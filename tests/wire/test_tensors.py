"""Against safetensors' own PyTorch reader and writer, and PyTorch's arithmetic."""

import math
import struct

import pytest
import torch
from safetensors.torch import save

from app.domain.breakpoints import TensorData
from app.domain.errors import FieldOutOfRange, MalformedRequest
from app.gpu.device.hardware import dtype_name
from app.wire.tensors import norm, read_one, vector_of


def data_of(tensor: torch.Tensor) -> TensorData:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return TensorData(dtype_name(tensor.dtype), tuple(tensor.shape), data)


@pytest.mark.parametrize("count", [0, 2])
def test_a_file_of_one_tensor_is_wanted(count: int) -> None:
    with pytest.raises(FieldOutOfRange, match=f"1 tensor, not {count}") as raised:
        read_one(save({str(index): torch.zeros(2) for index in range(count)}), param="vector")
    assert raised.value.param == "vector"


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a file",
        b"\xff" * 64,
        b"\x80\x04K\x01.",  # a pickle
        save({"h": torch.zeros(4)})[:-1],
        save({"h": torch.zeros(4)}) + b"\0",
        with_header(b"[" * 1000),
        with_header(b'{"h": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"\0" * 4),
        with_header(b'{"h": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 4]}}', b"\0" * 4),
        with_header(b'{"h": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"\0" * 4),
        with_header(b'{"h": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', b"\0" * 8),
        with_header(b'{"__metadata__": {"layer": 3}}'),
    ],
)
def test_what_is_no_such_file_is_malformed(content: bytes) -> None:
    with pytest.raises(MalformedRequest, match="not a safetensors file") as raised:
        read_one(content, param="h")
    assert raised.value.param == "body"


def test_lengths_do_not_overflow() -> None:
    assert norm(vector_of([3e38, 4e38 / 2])) == pytest.approx(math.hypot(3e38, 2e38))
    assert norm(vector_of([3e-30, 4e-30])) == pytest.approx(5e-30)
    assert norm(data_of(torch.tensor([60000.0, 60000.0], dtype=torch.float16))) == pytest.approx(
        math.hypot(60000, 60000), rel=1e-3
    )
