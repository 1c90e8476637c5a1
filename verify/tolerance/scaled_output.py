"""The last step of an O in 8 bits: what is stored of the exact O, and how far it may be off.

docs/tolerance.md, "Outputs in 8 bits", derives it; `references.output_scale` defines the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from references.output_scale import ScaledOutput
from verify.arithmetic.dtypes import DType, dtype_named
from verify.arithmetic.rounding import cast
from verify.tolerance.arithmetic import TINY, U


def stored(out: Tensor, output: ScaledOutput | None) -> Tensor:
    """What O8 approximates: clamp(s O, -max, max) of the exact O, fp64; O itself where it has more
    bits."""
    if output is None:
        return out
    largest = dtype_named(output.dtype).max
    return (out * output.scale).clamp_(-largest, largest)


def out_bound(size: Tensor, before: Tensor, form: DType, output: ScaledOutput | None) -> Tensor:
    """The bound of O as it is stored in that format: size is |O|, before the bound of O in fp32."""
    if output is not None:
        return stored_bound(size, before, output)
    rounded = (size + before).mul_(form.unit_roundoff)
    return rounded.add_(before).add_(form.smallest_subnormal / 2)


def stored_ends(
    out: Tensor, before: Tensor, form: DType, output: ScaledOutput | None
) -> tuple[Tensor, Tensor]:
    """The least and the largest number of that format that can be stored of an O in fp32 that is
    off by `before` at most, fp64: out is the exact O, both fp64.  To scale, to clamp and to round
    keep the order of two numbers.
    """
    if output is None:
        ends = [out + side * before for side in (-1, 1)]
    else:
        off = before_stored(out.abs(), before, output)
        ends = [(out * output.scale + side * off).clamp(-form.max, form.max) for side in (-1, 1)]
    low, high = (cast(end.numpy(), form).double() for end in ends)
    return low, high


def before_stored(size: Tensor, before: Tensor, output: ScaledOutput) -> Tensor:
    """How far s O may be off in fp32: size is |O|, before the bound of O, both fp64.  The product
    is rounded once, or flushed."""
    return output.scale * (before + U * (size + before)) + TINY


def stored_bound(size: Tensor, before: Tensor, output: ScaledOutput) -> Tensor:
    """The bound of O8 - `stored`: size is |O|, before the bound of O in fp32, both fp64.

    The product with s is rounded once in fp32.  To clamp moves no two numbers apart, and to round
    moves one by at most half a unit in the last place of the largest that it can be.  An element
    that is certain to saturate is exact.
    """
    form = dtype_named(output.dtype)
    off = before_stored(size, before, output)
    exact = output.scale * size
    top = torch.frexp((exact + off).clamp(2.0**form.emin, form.max)).exponent
    half = torch.ldexp(torch.ones_like(off), top - 1 - form.precision)
    return torch.where(exact - off >= form.max, 0.0, off + half)
