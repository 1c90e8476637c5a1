"""The place of a finding."""

from __future__ import annotations

import math

import pytest
import torch

from verify.judging.findings import coordinate, worst


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (2, 1, 3, 4), (1, 2, 5, 1)])
def test_coordinates_follow_each_other_as_the_elements_of_a_tensor(shape: tuple[int, ...]) -> None:
    elements = torch.arange(math.prod(shape)).view(shape)
    for flat in range(elements.numel()):
        assert int(elements[coordinate(flat, shape)]) == flat


def test_a_nan_is_the_worst_value() -> None:
    values = torch.tensor([[1.0, math.inf, 2.0], [0.0, math.nan, math.inf]])
    assert worst(values) == (1, 1)
    assert worst(values.nan_to_num(nan=0.0)) == (0, 1)
    assert worst(values.mT) == (1, 1)
    assert worst(values.mT.nan_to_num(nan=0.0)) == (1, 0)
