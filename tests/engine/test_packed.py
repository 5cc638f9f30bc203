"""Integer arrays of any shape arrive whole, on GPUs as views of one tensor."""

import numpy as np
import torch

from pdserve.engine.model_runner import pack, packed_copy, unpack

ARRAYS = [np.arange(5), np.array([[7]]), np.arange(12).reshape(3, 4) - 6, np.zeros((2, 0), dtype=np.int64)]


def test_packed_arrays_are_views_of_one_tensor() -> None:
    copies = unpack(pack(ARRAYS, pinned=False), ARRAYS)
    assert all(np.array_equal(copy.numpy(), array) for copy, array in zip(copies, ARRAYS, strict=True))
    assert {copy.dtype for copy in copies} == {torch.int32} and all(copy.is_contiguous() for copy in copies)
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    assert all(copy.storage_offset() % 4 == 0 for copy in copies)


def test_dtypes_by_device() -> None:
    copies = packed_copy(ARRAYS, torch.device("cpu"))
    assert all(np.array_equal(copy.numpy(), array) for copy, array in zip(copies, ARRAYS, strict=True))
    assert {copy.dtype for copy in copies} == {torch.long}
    assert {copy.dtype for copy in packed_copy(ARRAYS, torch.device("meta"))} == {torch.int32}
