"""What FPSan's algebra promises, in numpy: integers modulo 2^32 for numbers of fp32.

A model of what `verify.sanitizers.algebra` relies on, and of what it leaves out: sums and products
wrap, 2^x is a power of an odd number, a division is a product with an inverse, a narrower format
keeps the lowest bits, a wider one extends the sign.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

ROWS, KEYS, DIMS = 16, 64, 8
GENERATOR = np.uint32(0x9E3779B5)  # any odd number
INFINITY = np.int32(-0x7A3B1C2D)  # the integer of -inf: a number like any other
Integers = np.ndarray


def power(x: Integers) -> Integers:
    """2^x of FPSan."""
    result, bits = np.ones(x.shape, np.uint32), x.astype(np.uint32)
    base = np.full(1, GENERATOR)
    for _ in range(32):
        result = np.where(bits & 1, result * base, result)
        base, bits = base * base, bits >> 1
    return result


def inverse(x: Integers) -> Integers:
    """That of an odd number; what stands for it if it is even does not matter here."""
    y = x.copy()
    for _ in range(5):  # Newton: 3, 6, 12... bits are right
        y = y * (np.uint32(2) - x * y)
    return y


def cut(x: Integers, bits: int) -> Integers:
    """A narrower number, extended again."""
    shift = np.uint32(32 - bits)
    return ((x << shift).astype(np.int32) >> np.int32(shift)).astype(np.uint32)


def products(a: Integers, b: Integers) -> Integers:
    return (a[:, None, :] * b[None, :, :]).sum(2, dtype=np.uint32)


def weighted(p: Integers, v: Integers) -> Integers:
    return (p[:, :, None] * v[None, :, :]).sum(1, dtype=np.uint32)


@pytest.fixture(scope="module")
def inputs() -> tuple[Integers, Integers, Integers, np.uint32]:
    source = np.random.default_rng(0)
    shapes = ((ROWS, DIMS), (KEYS, DIMS), (KEYS, DIMS))
    q, k, v = (cut(source.integers(0, 1 << 32, s, np.uint32), 16) for s in shapes)
    return q, k, v, np.uint32(0x3F0A1B2D)


def plain(
    inputs: tuple, p_bits: int = 16, *, behind: bool = False
) -> tuple[Integers, Integers, Integers]:
    """(sum, O before the division, maximum), as the plain kernel computes them; behind: scaled
    behind the maximum."""
    q, k, v, scale = inputs
    s = products(q, k)
    x = s * scale
    m = np.maximum((s if behind else x).astype(np.int32).max(1), INFINITY).astype(np.uint32)
    m = m * scale if behind else m
    p = power(x - m[:, None])
    return p.sum(1, dtype=np.uint32), weighted(cut(p, p_bits), v), m


def tiled(
    inputs: tuple, block: int, order: Callable[[range], list[int]], p_bits: int = 16, slip: str = ""
) -> tuple[Integers, Integers, Integers]:
    """The same by blocks of keys in some order, with a running maximum."""
    q, k, v, scale = inputs
    m = np.full(len(q), INFINITY).astype(np.uint32)
    total = np.zeros(len(q), np.uint32)
    acc = np.zeros((len(q), DIMS), np.uint32)
    for turn, start in enumerate(order(range(0, len(k), block))):
        if slip == "lost-block" and turn == 1:
            continue
        keys = slice(start, start + block)
        x = products(q, (v if slip == "swapped-operand" else k)[keys]) * scale
        x = x * scale if slip == "wrong-scale" and turn == 1 else x
        new = np.maximum(m.astype(np.int32), x.astype(np.int32).max(1)).astype(np.uint32)
        p, alpha = power(x - new[:, None]), power(m - new)
        total = (total if slip == "stale-sum" else total * alpha) + p.sum(1, dtype=np.uint32)
        acc = acc * alpha[:, None] + weighted(cut(p, p_bits), v[keys])
        m = new
    return total, acc, m


def out(found: tuple[Integers, Integers, Integers]) -> Integers:
    """O in 16 bits."""
    total, acc, _ = found
    return cut(acc * inverse(total)[:, None], 16)


def forwards(starts: range) -> list[int]:
    return list(starts)


def backwards(starts: range) -> list[int]:
    return list(starts)[::-1]


@pytest.mark.parametrize("block", [8, 16, 32])
@pytest.mark.parametrize("order", [forwards, backwards])
def test_tiles_and_order_change_no_bit(inputs: tuple, block: int, order: Callable) -> None:
    whole, found = plain(inputs), tiled(inputs, block, order)
    assert np.array_equal(whole[2], found[2])
    assert np.array_equal(whole[0], found[0])  # the sum, in 32 bits, and so the LSE
    assert np.array_equal(out(whole), out(found))
    assert not np.array_equal(whole[1], found[1])  # O in 32 bits: P was cut before it was rescaled


@pytest.mark.parametrize("slip", ["lost-block", "swapped-operand", "wrong-scale", "stale-sum"])
def test_a_slip_changes_bits(inputs: tuple, slip: str) -> None:
    whole, found = plain(inputs), tiled(inputs, 16, forwards, slip=slip)
    assert not np.array_equal(whole[0], found[0])
    assert not np.array_equal(out(whole), out(found))


@pytest.mark.parametrize("block", [8, 16, 32])
def test_in_8_bits_the_sum_and_o_of_the_same_blocks_agree(inputs: tuple, block: int) -> None:
    whole, found = plain(inputs, 8), tiled(inputs, block, forwards, 8)
    assert np.array_equal(whole[0], found[0])  # and so the LSE
    # O agrees in its lowest 8 bits with other blocks, and in all with the same ones, whatever rows
    # are computed together.
    assert np.array_equal(cut(whole[1], 8), cut(found[1], 8))
    q, *rest = inputs
    halves = [tiled((rows, *rest), block, forwards, 8) for rows in (q[:5], q[5:])]
    assert np.array_equal(np.concatenate([out(half) for half in halves]), out(found))


def test_what_is_left_out_would_accuse_right_kernels(inputs: tuple) -> None:
    # P in 8 bits, O in 16.
    assert not np.array_equal(out(plain(inputs, 8)), out(tiled(inputs, 16, forwards, 8)))
    # A key that a row does not see: its weight is odd, and so not 0.
    q, k, _, scale = inputs
    assert (power(np.full(1, INFINITY).astype(np.uint32) - plain(inputs)[2]) & 1).all()
    # A scale behind the maximum.
    behind = plain(inputs, behind=True)
    assert not np.array_equal(out(plain(inputs)), out(behind))
    assert not np.array_equal(plain(inputs)[0], behind[0])
    # P is cut before another scale: a rescaling that is a product commutes with it, modulo 2^16.
    p = products(q, k) * scale
    assert np.array_equal(cut(cut(p, 16) * scale, 16), cut(p * scale, 16))
    assert not np.array_equal(cut(p, 16) * scale, p * scale)
