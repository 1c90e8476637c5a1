"""The control problem: right on a device that computes rightly, wrong where one element is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from verify.campaign.leases import control


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_a_good_device_is_right(seed: int) -> None:
    assert control.check(seed, "cpu") == ""


def _one_bit(c: torch.Tensor) -> None:
    c[17, 200] ^= 1


def _one_row_twice(c: torch.Tensor) -> None:
    c[5] = c[6]


def _nan(c: torch.Tensor) -> None:
    c[0, 0] = 1 << 20  # as `product` says what is no number


@pytest.mark.parametrize("fault", [_one_bit, _one_row_twice, _nan])
@pytest.mark.parametrize("at", [0, 2])
def test_one_wrong_element_is_seen(
    fault: Callable[[torch.Tensor], None], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first format, and in the last one alone."""
    real = control.product
    calls = 0

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        c = real(a, b)
        if calls == at:
            fault(c)
        calls += 1
        return c

    monkeypatch.setattr(control, "product", product)
    said = control.check(3, "cpu")
    assert said.startswith("the control problem is wrong in 1 of 256 rows")
    assert ("float32", "", "bfloat16")[at] in said


def test_what_is_no_integer_is_wrong() -> None:
    a = torch.tensor([[0.5, float("nan")]])
    b = torch.tensor([[1.0], [0.0]])
    assert control.product(a[:, :1], b[:1]).tolist() == [[1 << 20]]
    assert control.product(a, b).tolist() == [[1 << 20]]


def test_results_fit_the_narrowest_format() -> None:
    """32 factors of at most 7: an integer that bfloat16 holds."""
    largest = control._LARGEST * control._ONES
    assert torch.tensor(float(largest)).to(torch.bfloat16) == largest <= 256
