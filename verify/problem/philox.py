"""The counter-based generator Philox-4x64-10 in torch's integer operations, on any device.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.  numpy computes
the same words on a CPU (`numpy.random.Philox`), faster; its first block has counter 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW = (1 << 32) - 1
_WORD = (1 << 64) - 1


def words(asked: Sequence[tuple[int, int]], device: torch.device | str) -> list[Tensor]:
    """The first 64-bit words of each (key of 128 bits, count): int64, the bits of unsigned ones.

    All keys go through the same few hundred operations, whose launches take a GPU longer than their
    work does.
    """
    blocks = [-(-count // 4) for _, count in asked]
    counter = torch.cat([torch.arange(1, count + 1, device=device) for count in blocks])
    halves = [(key & _WORD, key >> 64) for key, _ in asked]
    multiplier, step, *own = _columns([_MULTIPLIERS, _WEYL, *halves], device)
    key = torch.cat([each.expand(2, count) for each, count in zip(own, blocks, strict=True)], dim=1)
    # Words 0 and 2 of a block, which a round multiplies, and words 1 and 3.
    even = torch.stack((counter, torch.zeros_like(counter)))
    odd = torch.zeros_like(even)
    low = multiplier & _LOW
    high = _high(multiplier)
    for _ in range(_ROUNDS):
        above = _product_high(even, low, high)
        below = even * multiplier  # of int64, the bits of uint64's product modulo 2^64
        even = above.flip(0).bitwise_xor_(odd).bitwise_xor_(key)
        odd = below.flip(0)
        key = key + step
    drawn = torch.stack((even[0], odd[0], even[1], odd[1]), dim=1)
    parts = torch.split(drawn, blocks)
    return [part.reshape(-1)[:count] for part, (_, count) in zip(parts, asked, strict=True)]


def _columns(pairs: Sequence[tuple[int, int]], device: torch.device | str) -> Tensor:
    """(pairs, 2, 1) int64 with the bits of unsigned words."""
    signed = [[word - (word >> 63 << 64) for word in pair] for pair in pairs]
    return torch.tensor(signed, device=device)[..., None]


def _high(x: Tensor) -> Tensor:
    """The upper 32 bits of each word."""
    return (x >> 32).bitwise_and_(_LOW)


def _product_high(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The upper 64 bits of the unsigned products of x and high * 2^32 + low.

    No sum below passes 2^64: (2^32 - 1)^2 + 2^32 - 1 < 2^64.
    """
    x_low = x & _LOW
    x_high = _high(x)
    middle = torch.addcmul(_high(x_low * low), x_low, high)
    rest = torch.addcmul(middle & _LOW, x_high, low)
    return torch.addcmul(_high(middle), x_high, high).add_(_high(rest))
