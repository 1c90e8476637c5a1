"""An infinity is right on the side where truth and bound reach past overflow."""

from __future__ import annotations

import math

import pytest
import torch

from verify.arithmetic.dtypes import dtype_named
from verify.judging.comparison import compare

torch.set_num_threads(1)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("got", "want", "bound", "right"),
    [
        (INF, 65000.0, 600.0, True),
        (INF, 65000.0, 500.0, False),
        (-INF, 65000.0, 600.0, False),
        (-INF, 1.0, 1e5, True),
        (INF, -1.0, 1e5, True),
        (-INF, 0.0, 65520.0, True),
        (-INF, 1.0, 65520.0, False),
        (NAN, 1.0, 1e5, False),
        (NAN, 1.0, INF, True),
    ],
)
def test_an_infinity_is_right_on_the_side_where_the_bound_reaches_past_overflow(
    got: float, want: float, bound: float, right: bool
) -> None:
    """Of sums that cancel the sign may be lost, too."""
    tensors = (torch.tensor([x], dtype=torch.float64) for x in (want, bound))
    compared = compare(torch.tensor([got], dtype=torch.float16), *tensors, dtype_named("float16"))
    assert (compared.worst <= 1) is right
