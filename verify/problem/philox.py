"""The counter-based generator Philox-4x64-10 in torch's integer operations, on any device.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.  numpy computes
the same words on a CPU (`numpy.random.Philox`), faster; its first block has counter 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW = (1 << 32) - 1
_WORD = (1 << 64) - 1


def words(key: int, count: int, device: torch.device | str) -> Tensor:
    """The first `count` 64-bit words of a key of 128 bits: int64, the bits of unsigned ones."""
    counter = torch.arange(1, -(-count // 4) + 1, device=device)
    # Words 0 and 2 of a block, which a round multiplies, and words 1 and 3.
    even = torch.stack((counter, torch.zeros_like(counter)))
    odd = torch.zeros_like(even)
    multiplier, *keys = _constants(key, device)
    low = multiplier & _LOW
    high = _high(multiplier)
    for of_round in keys:
        above = _product_high(even, low, high)
        below = even * multiplier  # of int64, the bits of uint64's product modulo 2^64
        even = above.flip(0).bitwise_xor_(odd).bitwise_xor_(of_round)
        odd = below.flip(0)
    return torch.stack((even[0], odd[0], even[1], odd[1]), dim=1).reshape(-1)[:count]


def _constants(key: int, device: torch.device | str) -> Tensor:
    """(1 + _ROUNDS, 2, 1) int64: the multipliers, and the keys of each round."""
    low, high = key & _WORD, key >> 64
    pairs = [_MULTIPLIERS]
    for number in range(_ROUNDS):
        pairs.append(((low + number * _WEYL[0]) & _WORD, (high + number * _WEYL[1]) & _WORD))
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
