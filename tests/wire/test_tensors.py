"""Against safetensors' own PyTorch reader and writer, and PyTorch's arithmetic."""

import json
import math
import struct

import pytest
import torch
from safetensors.torch import load, save

from app.domain.breakpoints import TensorData
from app.domain.errors import FieldOutOfRange, MalformedRequest
from app.gpu.device.hardware import dtype_name
from app.wire.tensors import norm, read_one, to_float32, vector_of, write_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUMBERS = [0.0, -0.0, 1.0, -1.5, 3.140625, 6e-5, 60000.0, -0.333984375]


def tensor_of(dtype: str, *shape: int) -> torch.Tensor:
    return torch.tensor(NUMBERS).to(DTYPES[dtype]).reshape(shape)


def data_of(tensor: torch.Tensor) -> TensorData:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return TensorData(dtype_name(tensor.dtype), tuple(tensor.shape), data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_what_others_read(dtype: str) -> None:
    tensors = {"a": tensor_of(dtype, 2, 4), "b": tensor_of(dtype, 8)}
    content = write_file({name: data_of(tensor) for name, tensor in tensors.items()}, {"layer": "3"})
    found = load(content)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)
    (length,) = struct.unpack_from("<Q", content)
    assert json.loads(content[8 : 8 + length])["__metadata__"] == {"layer": "3"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_others_write_is_read(dtype: str) -> None:
    tensor = tensor_of(dtype, 4, 2)
    name, found, metadata = read_one(save({"h": tensor}, {"first": "4"}), param="activation")
    assert (name, metadata) == ("h", {"first": "4"})
    assert found == data_of(tensor)
    assert torch.equal(torch.from_numpy(to_float32(found).copy()), tensor.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_found_and_the_largest_are_numbers(dtype: str, value: float) -> None:
    tensor = tensor_of(dtype, 8)
    tensor[0], tensor[1] = torch.finfo(tensor.dtype).max, torch.finfo(tensor.dtype).min
    assert read_one(save({"h": tensor}), param="activation")[1] == data_of(tensor)
    tensor[5] = value
    with pytest.raises(FieldOutOfRange, match="element 5 is not finite") as raised:
        read_one(save({"h": tensor}), param="activation")
    assert raised.value.param == "activation"


@pytest.mark.parametrize("count", [0, 2])
def test_a_file_of_one_tensor_is_wanted(count: int) -> None:
    with pytest.raises(FieldOutOfRange, match=f"1 tensor, not {count}") as raised:
        read_one(save({str(index): torch.zeros(2) for index in range(count)}), param="vector")
    assert raised.value.param == "vector"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_other_types_of_numbers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(FieldOutOfRange, match="must be one of F32, BF16, F16") as raised:
        read_one(save({"h": torch.zeros(2).to(dtype)}), param="h")
    assert raised.value.param == "dtype"


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
