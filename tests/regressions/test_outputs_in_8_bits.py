"""Outputs in 8 bits are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness.in_process import SUPPORT

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_outputs_in_8_bits_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(
        ValueError, match=f"^support.dtypes_out: no oracle judges outputs in {dtype}$"
    ):
        replace(SUPPORT, dtypes_out=("float16", dtype))
    assert replace(SUPPORT, dtypes_out=("float16", "float32")).dtypes_out == ("float16", "float32")
