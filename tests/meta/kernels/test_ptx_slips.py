"""The raw-PTX kernels without a GPU: one thing removed or changed in a source is seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from references.masks import Full, Window
from references.quantisation import parse_quantisation
from tests.harness.host_library import runs
from tests.harness.ptx_host import SCHEDULES, Choice, Host, convict, run, stored
from tests.harness.ptx_together import Edited, Together
from tests.properties import tier
from verify.problem import Problem

torch.set_num_threads(1)

# One thing removed or changed, each time, in a tiling that it matters for.  Slips of waiting and of
# barriers show in the schedule that they are open to.  "NAME:3" is config 3 (share-qkv's takes two
# pieces of Q), and "NAME:3:transposed" with such K.

BARRIER = r"__syncthreads\(\);(?=  // {})"
SLIPS = {
    "barrier before Q": ("split_q", BARRIER.format("Q: its"), ""),
    "barrier before an item": (
        "share_kv",
        r"__syncthreads\(\);(?=  // item: all copies have landed\n)",
        "",
    ),
    "barrier before a slot": ("share_kv", BARRIER.format("slot"), ""),
    "barrier before the next piece of Q": ("share_qkv:3", BARRIER.format("piece"), ""),
    "barrier before a piece of Q": ("share_qkv:3", BARRIER.format("Q: all"), ""),
    "barrier after Q": ("share_qkv", BARRIER.format("ring"), ""),
    "barrier before maxima": ("split_kv", BARRIER.format("maxima"), ""),
    "barrier before P": ("tiling_qk", BARRIER.format("P"), ""),
    "barrier before sums": ("split_kv", BARRIER.format("sums"), ""),
    "wait for Q": ("split_q", r"wait_group<ahead>\(\)", "wait_group<ahead + 1>()"),
    "wait for an item": (
        "share_kv",
        r"ptx::cp_async_wait_group<0>\(\);(?=\s*__syncthreads\(\);  // item)",
        "",
    ),
    "wait for a piece of Q": (
        "share_qkv:3",
        r"ptx::cp_async_wait_group<0>\(\);(?=\s*__syncthreads\(\);  // Q)",
        "",
    ),
    "columns of V": ("tiling_qk", r"copy_v\(0\);", ""),
    "slice of Q": ("tiling_qkv", r"q \+ column", "q"),
    "slice of V": ("tiling_qkv", r"v \+ column", "v + 0 * column"),
    "swizzle": ("split_q", r"chunk \^ row / apart % \(8 / apart\)", "chunk"),
    "swizzle of narrow rows": ("tiling_qk", r"chunks % 4 == 0 \? 2 : 4", "1"),
    "slot": ("split_q", r"M::ring \+ read_slot \* M::item", "M::ring"),
    "first masked key": ("split_q", r"masked_from = first\.high", "masked_from = last.high"),
    "last masked key": ("split_q", r"masked_below = last\.low", "masked_below = first.low"),
    "key head of a query head": (
        "split_q",
        r"a\.k\.batch \+ head / a\.group",
        "a.k.batch + head % (a.heads_q / a.group)",
    ),
    "transposition": ("split_q", r"ldmatrix_x4_trans\(b, slice", "ldmatrix_x4(b, slice"),
    "transposition of K": (
        "split_q:1:transposed",
        r"ldmatrix_x4_trans\(b, row",
        "ldmatrix_x4(b, row",
    ),
    "tail of keys, too short": (
        "split_q:1:transposed",
        r"chunk \+ byte < row_end",
        "chunk + byte + 2 < row_end",
    ),
    "chunk behind the last key": (
        "split_q:1:transposed",
        r"whole && i < left",
        "i < left",
    ),
    "pitch of K": (
        "split_q:1:transposed",
        r"k_slice, from, a\.k\.row",
        "k_slice, from, 2 * a.seqlen_kv",
    ),
    "key of a transposed slice": (
        "split_q:1:transposed",
        r"static_cast<long long>\(key\) \* T::element",
        "0 * key",
    ),
    "column of a transposed slice": (
        "tiling_qk:1:transposed",
        r"T::depth \* step \* a\.k\.row",
        "0 * step",
    ),
    "maximum of half a row": (
        "split_q",
        r"raised\[i\]\[h\] = fmaxf\(most, ptx::shfl_bfly\(most, 2\)\)",
        "raised[i][h] = most",
    ),
    "maximum of half the warps": (
        "split_kv",
        r"fmaxf\(raised\[i\]\[h\], partial_of\(w",
        "fmaxf(raised[i][h], partial_of(0",
    ),
    "sum of half a row": ("split_q", r"l\[i\]\[h\] \+= ptx::shfl_bfly\(l\[i\]\[h\], 2\);", ""),
    "sum of half the warps": (
        "split_kv",
        r"l\[i\]\[h\] \+= partial_of\(w",
        "l[i][h] += partial_of(0",
    ),
    "rescale": ("split_q", r"l\[i\]\[h\] \*= alpha\[i\]\[h\];", ""),
    "trade of columns": (
        "split_q",
        r"t & bit \? pairs\[low\] : pairs",
        "t & 1 ? pairs[low] : pairs",
    ),
    "place of eight columns": ("split_q_fp8", r"t % 2 \* 2 \+ t / 2", "t"),
    "even and odd columns": ("split_q_fp8", r"o\[even \+ 1\]\[2 \* h", "o[even][2 * h"),
    "odd columns of V": ("split_q_fp8", "0x7531", "0x6420"),
    "bytes of V": ("split_q_fp8", "0x6420", "0x6240"),
    "order of keys": (
        "split_q_fp8",
        r"even\[0\], even\[1\], low, high",
        "low, high, even[0], even[1]",
    ),
    "halves of the keys": ("split_q_fp8", r"n % 4 / 2 \* 2 \+ h", "2 - n % 4 / 2 * 2 + h"),
    "scale of P in the LSE": ("split_q_fp8", r"1 << T::p_exponent", "1"),
    "scale of P": ("split_q_fp8", r"scale_log2 - T::p_exponent", "scale_log2"),
    "factor of Q": ("split_q_fp8", r"factor\(a\.descale_q\) \* ", ""),
    "factor of V": ("split_q_fp8", r"factor\(a\.descale_v\) : 1.0f", "1.0f : 1.0f"),
    "factor of a head": (
        "split_q_fp8",
        r"head / a\.group \* of\.head",
        "head % (a.heads_q / a.group) * of.head",
    ),
    "scale of 0 in registers": ("split_q", r"q_kept && factor_in_q\(\)", "false"),
    "scale of 0 in a tile": ("share_kv", r"multiply_q_tile<typename M::QTile>\(shared\);", ""),
    "scale of 0 in slices": ("tiling_qkv", r"multiply_q_tile<typename M::QSlice>\(item\);", ""),
    "sign of sums": ("split_q_fp8", r"= -s\[i\]\[n\]\[e\]", "= s[i][n][e]"),
    "sign of all factors": ("split_q_fp8", r"< 0\.0f \? -1\.0f : 1\.0f", "< 0.0f ? 1.0f : 1.0f"),
}
SLIP_HEAD_DIMS = {"barrier before P": 512}  # 64 for the others
MASKED = {"first masked key": Window(None, 10), "last masked key": Window(10, None)}


def choice_of(name: str) -> Choice:
    """The build that a slip is made in."""
    tiling, _, index = SLIPS[name][0].partition(":")
    index, _, storage = index.partition(":")
    dtype = "float8_e4m3fn" if tiling == "split_q_fp8" else "float16"
    kind = "band" if name in MASKED else "full"
    head_dim = SLIP_HEAD_DIMS.get(name, 64)
    return Choice(tiling, int(index or 0), dtype, head_dim, kind, storage or "strided")


def slip(name: str, text: str) -> str:
    """The text with that slip."""
    _, pattern, instead = SLIPS[name]
    slipped, count = re.subn(pattern, instead, text)
    assert count == 1, name
    return slipped


@pytest.fixture(scope="module")
def slipped(tmp_path_factory: pytest.TempPathFactory) -> Together:
    builds = {name: Edited(choice_of(name), partial(slip, name)) for name in SLIPS}
    return Together(builds, tmp_path_factory)


@runs
@pytest.mark.parametrize("name", tier.for_ci(SLIPS))
def test_every_slip_is_seen(name: str, slipped: Together, launched: Callable[[Host], Host]) -> None:
    """By the bound, by what lies around the outputs, or by bank conflicts."""
    choice = choice_of(name)
    eight = choice.format.startswith("float8")
    variant, config = choice.variant, choice.build[0]
    kernel = launched(slipped.host(name))
    problem = Problem(
        heads_q=4,
        heads_kv=2,
        seqlen_q=63,
        seqlen_kv=200 if choice.storage == "strided" else 197,  # a row of keys ends inside 16 bytes
        head_dim=choice.head_dim,
        dtype=choice.format,
        mask=MASKED.get(name, Full()),
        softmax_scale=0.0 if name.startswith("scale of 0") else -0.125 if eight else None,
        quantisation=parse_quantisation("head" if eight else "none"),
        **stored(choice, 16),
    )
    for kernel.schedule in SCHEDULES:
        try:
            found = convict(variant, problem, config, *run(variant, problem, config))
        except AssertionError as error:
            found = str(error) or "written outside"
        if found is not None:
            return
    pytest.fail(f"nothing was seen without the {name}")
