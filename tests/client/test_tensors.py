"""Tensors on the wire, against the libraries that wrote the format and the type: safetensors and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load, save

import client
from client import tensors
from client.captures import parse_captures

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
values = arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(1, 5)), elements=st.floats(width=32))


@pytest.mark.parametrize("dtype", DTYPES)
@given(array=values)
def test_what_is_written_is_what_pytorch_rounds_to(dtype: str, array: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    found = load(tensors.dump("h", array, dtype))["h"]
    expected = torch.from_numpy(array).to(DTYPES[dtype])
    assert found.dtype == DTYPES[dtype]
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@given(array=values)
def test_what_pytorch_writes_is_read_without_loss(dtype: str, array: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    tensor = torch.from_numpy(array).to(DTYPES[dtype])
    found, metadata = tensors.load(save({"h": tensor}, metadata={"layer": "3"}))
    assert metadata == {"layer": "3"}
    assert found["h"].dtype == (np.float16 if dtype == "float16" else np.float32)
    np.testing.assert_array_equal(found["h"], tensor.float().numpy())


@pytest.mark.parametrize("order", [np.s_[:], np.s_[::-1], np.s_[::2]])
def test_any_layout_in_memory_is_written_row_by_row(order: slice) -> None:
    array = np.arange(12, dtype=">f8").reshape(3, 4).T[order]
    np.testing.assert_array_equal(load(tensors.dump("h", array, "float32"))["h"].numpy(), array)


@pytest.mark.parametrize("wrong", [["a"], [[1.0], [1.0, 2.0]], 1 + 2j, None, {}])
def test_what_is_not_numbers_is_not_sent(wrong: Any) -> None:
    with pytest.raises(client.InvalidRequest):
        tensors.dump("h", wrong, "float32")


@given(body=st.binary() | st.just(save({"h": torch.ones(2, dtype=torch.int64)})))
def test_any_other_bytes_or_types_are_an_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        tensors.load(body)


def test_captures_without_their_metadata_are_an_error() -> None:
    for metadata in ({}, {"dropped": "0"}, {"dropped": "0", "h": "{}"}, {"dropped": "0", "h": "["}):
        with pytest.raises(ValueError, match=r"\w"):
            parse_captures(save({"h": torch.ones(1, 2)}, metadata=metadata))
