"""The control problem: products of matrices whose exact result any device must give.

A device with a broken unit or broken memory gives another.  A holds integers up to 7, and B at most
32 times 1 or -1 in a column: every sum, partial or whole, is an integer up to 224, which float32,
float16 and bfloat16 (integers up to 256) hold exactly, in any order of summation.  The result C is
checked by Freivalds' method (R. Freivalds, 1977): C x = A (B x) in 64-bit integers on the CPU, for
two random vectors x of 20 bits; a wrong C passes with a probability of at most 2^-40.
"""

from __future__ import annotations

import torch

_SIZE = {"cuda": 4096, "cpu": 256}
_LARGEST = 7
_ONES = 32  # in a column of B
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check(seed: int, device: str | None = None) -> str:
    """Compute the control problem on a device ("cuda" or "cpu"; by default the first one that is
    there); returns what is wrong, or "".

    Raises RuntimeError if the device does not answer.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = _SIZE[device]
    random = torch.Generator().manual_seed(seed)
    a = torch.randint(-_LARGEST, _LARGEST + 1, (size, size), generator=random)
    b = torch.zeros(size, size, dtype=torch.int64)
    rows = torch.randint(0, size, (_ONES, size), generator=random)
    signs = 2 * torch.randint(0, 2, (_ONES, size), generator=random) - 1
    b.scatter_(0, rows, signs)
    x = torch.randint(0, 1 << 20, (size, 2), generator=random)
    expected = a @ (b @ x)
    for dtype in _DTYPES:
        c = product(a.to(device, dtype), b.to(device, dtype))
        wrong = int((c @ x != expected).any(dim=1).sum())
        if wrong:
            name = str(dtype).removeprefix("torch.")
            return f"the control problem is wrong in {wrong} of {size} rows ({name})"
    return ""


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of two matrices on their device, as 64-bit integers on the CPU; what is no
    integer is no result of the control problem, and becomes one that cannot be."""
    c = (a @ b).to("cpu", torch.float64)
    return torch.where(c == c.round(), c, 1 << 20).nan_to_num(1 << 20).to(torch.int64)
