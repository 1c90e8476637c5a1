"""The raw-PTX kernels on trial without a GPU: what the names of their tilings promise, and their
own sources run by a host compiler's code (tests/harness/ptx_host.py)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.cuda import family
from kernels.ptx import split_q
from kernels.ptx.tiling import ELEMENT, HEAD_DIMS, ROOM, STORAGES, config
from references.masks import Causal, Documents, Full, Lengths, Window
from references.quantisation import parse_quantisation
from references.score_mods import Softcap
from tests.harness.host_library import COMPILER
from tests.harness.ptx_host import (
    MODULES,
    SCHEDULES,
    Choice,
    Host,
    convict,
    inputs_of,
    run,
)
from verify.cuda.compile import compilable, compile_source
from verify.cuda.sass import listing
from verify.cuda.toolkit import executables
from verify.problem import Layout, Problem
from verify.problem.storage.transposed import Transposed
from verify.variant import AttentionArgs, Config, Unsupported

torch.set_num_threads(1)

runs = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

# What the names promise.


def shared_bytes(name: str, config: Config, head_dim: int) -> int:
    return int(MODULES[name].TILING.shared_bytes(config, head_dim))


def test_one_tile_of_share_qkv_holds_what_four_of_split_q_hold() -> None:
    """At the same blocks and one stage, where a block has twice as many rows as keys."""
    for head_dim in HEAD_DIMS:
        sizes = [
            shared_bytes(name, config(128, 64, 1), head_dim) for name in ("share_qkv", "split_q")
        ]
        assert sizes[1] == 4 * sizes[0]


def test_slices_of_tiling_qk_do_not_grow_with_head_dim() -> None:
    """All that grows is V's tile."""
    chosen = config(64, 32, 2, depth=16)
    rest = {
        shared_bytes("tiling_qk", chosen, head_dim) - 32 * head_dim * ELEMENT
        for head_dim in HEAD_DIMS
    }
    assert len(rest) == 1


def test_tiling_qkv_does_not_grow_with_head_dim() -> None:
    """But P's tile, the maxima and the sums, where several warps share a row."""
    chosen = config(64, 64, 2, depth=16)
    sizes = [shared_bytes("tiling_qkv", chosen, head_dim) for head_dim in HEAD_DIMS]
    assert len(set(sizes)) == 1
    v_slices = 2 * 64 * 64 * ELEMENT  # four warps divide 64 columns
    assert shared_bytes("tiling_qkv", chosen, 512) == v_slices + 64 * (64 * ELEMENT + 4 * 4)
    assert shared_bytes("tiling_qkv", chosen, 1024) == v_slices + 32 * (64 * ELEMENT + 4 * 4)


@pytest.mark.parametrize("name", MODULES)
def test_few_builds_meet_every_pair_of_choices(name: str) -> None:
    """Both storages of K in every config, head dim, dtype and kind of mask."""
    module = MODULES[name]
    for variant in getattr(module, "VARIANTS", [module.VARIANT]):
        support = variant.support
        names = [build.name for build in variant.builds("sm_90a")]
        configs = [config.name for config in variant.configs]
        assert len(names) == len(set(names)) <= 1.4 * len(configs) * len(support.head_dims)
        parts = (
            *(f"{config}-" for config in configs),
            *(f"-d{head_dim}-" for head_dim in support.head_dims),
            *(f"-{dtype}-" for dtype in support.dtypes),
            *(f"-{kind}" for kind in ("full", "band", "table")),
        )
        for part in parts:
            storages = {build.endswith("-transposed") for build in names if part in build}
            assert storages == {word != "strided" for word in support.storages}, part


def test_padded_rows_of_keys_take_their_own_room() -> None:
    """A slice of transposed K has a row for each column."""
    for swizzle, more in (("qkv", 0), ("none", 16 * (128 - 64))):
        chosen = config(64, 64, 1, swizzle=swizzle)
        sizes = [split_q.TILING.shared_bytes(chosen, 128, word) for word in STORAGES]
        assert sizes[1] - sizes[0] == 2 * more  # two slots


def test_a_config_that_the_device_has_no_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(family, "shared_room", lambda device: 24 * 1024 - 1)
    out = torch.full((1, 1, 8, 64), 7.0, dtype=torch.float16)
    assert split_q.VARIANT.forward is not None
    with pytest.raises(Unsupported, match="24576 bytes of shared memory") as refusal:
        split_q.VARIANT.forward(arguments(), out, torch.zeros(1, 1, 8), {})
    assert refusal.value.argument == "config"
    assert (out == 7.0).all()


# The kernel on the CPU.


@pytest.fixture
def host(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Makes `forward` run on the CPU: host(choice) gives the `Host` of a build, which forward then
    launches."""
    current: list[Host] = []

    def hosts(choice: Choice, edit: Callable[[str], str] = lambda text: text) -> Host:
        made = MODULES[choice.name].TILING.launch(*choice.build, narrow=choice.narrow)
        current[:] = [Host(made.source, tmp_path_factory.mktemp("host"), edit)]
        return current[0]

    monkeypatch.setattr(family, "_kernel", lambda source, arch: current[0])
    monkeypatch.setattr(family, "device_arch", lambda device: "host")
    monkeypatch.setattr(family, "shared_room", lambda device: ROOM)
    monkeypatch.setattr(family, "launch", lambda kernel, *rest: kernel.launch(*rest))
    return hosts


PITCHED, ASIDE = Layout("bshd", pitch=8), Layout(pitch=16, offset=8)
WIDE = {
    "layout_q": Layout("bshd"),
    "layout_k": PITCHED,
    "layout_v": Layout("sbhd"),
    "layout_out": PITCHED,
}
SHAPES: dict[str, list[dict[str, Any]]] = {
    "full": [
        {"batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 70, "seqlen_kv": 133, **WIDE},
        {"seqlen_q": 1, "seqlen_kv": 64, "softmax_scale": -0.25, "distribution": "large_logits"},
        {
            "heads_q": 3,
            "heads_kv": 3,
            "seqlen_q": 16,
            "seqlen_kv": 7,
            "softmax_scale": 0.0,
            "layout_k": ASIDE,
        },
        {"seqlen_q": 5, "seqlen_kv": 0},
        {"seqlen_q": 0, "seqlen_kv": 5},
    ],
    "band": [
        {
            "batch": 2,
            "heads_q": 4,
            "heads_kv": 2,
            "seqlen_q": 66,
            "seqlen_kv": 150,
            "mask": Causal(),
            **WIDE,
        },
        {"seqlen_q": 130, "seqlen_kv": 65, "mask": Causal(), "distribution": "increasing"},
        {"seqlen_q": 40, "seqlen_kv": 100, "mask": Causal("tl"), "softmax_scale": -0.1},
        {"seqlen_q": 70, "seqlen_kv": 3, "mask": Window(20, 1, "tl")},
        {"seqlen_q": 150, "seqlen_kv": 140, "mask": Window(33, 2)},
    ],
    "table": [
        {"batch": 2, "seqlen_q": 70, "seqlen_kv": 130, "mask": Lengths((70, 31), (0, 99))},
        {"seqlen_q": 140, "seqlen_kv": 140, "mask": Causal() & Lengths((129,), (101,)), **WIDE},
        {"seqlen_q": 100, "seqlen_kv": 160, "mask": Documents((90, 70))},
    ],
}
# Each tiling's choices meet every config, dtype, kind of mask and way to accumulate; the head dims
# are those that differ in how rows lie, and in which warps share them.
CHOICES = [
    Choice("split_q", 0, "float16", 64, "full"),
    Choice("split_q", 1, "bfloat16", 96, "band"),
    Choice("split_q", 2, "float16-narrow", 32, "table"),
    Choice("split_q", 3, "bfloat16", 64, "table"),
    Choice("split_q", 1, "float16", 64, "full", "transposed"),
    Choice("split_q", 2, "bfloat16", 32, "band", "transposed"),
    Choice("split_q_fp8", 0, "float8_e4m3fn", 64, "full"),
    Choice("split_q_fp8", 1, "float8_e5m2", 96, "band"),
    Choice("split_q_fp8", 2, "float8_e4m3fn", 32, "table"),
    Choice("split_q_fp8", 3, "float8_e5m2", 128, "full"),
    Choice("split_kv", 0, "bfloat16", 96, "table"),
    Choice("split_kv", 1, "bfloat16", 96, "full", "transposed"),
    Choice("split_kv", 2, "float16-narrow", 64, "band", "transposed"),
    Choice("split_kv", 1, "float16", 64, "band"),
    Choice("split_kv", 2, "float16-narrow", 32, "full"),
    Choice("share_kv", 0, "bfloat16", 64, "band"),
    Choice("share_kv", 1, "float16-narrow", 96, "full"),
    Choice("share_kv", 2, "float16", 32, "table"),
    Choice("share_kv", 3, "bfloat16", 64, "full"),
    Choice("share_kv", 0, "float16", 96, "table", "transposed"),
    Choice("share_qkv", 0, "float16", 32, "band"),
    Choice("share_qkv", 1, "bfloat16", 64, "full"),
    Choice("share_qkv", 2, "float16-narrow", 64, "band"),
    Choice("share_qkv", 3, "float16", 96, "table"),
    Choice("share_qkv", 3, "float16-narrow", 64, "full", "transposed"),
    Choice("tiling_qk", 0, "float16", 32, "full"),
    Choice("tiling_qk", 0, "bfloat16", 512, "band"),
    Choice("tiling_qk", 1, "float16-narrow", 96, "band"),
    Choice("tiling_qk", 2, "bfloat16", 64, "table"),
    Choice("tiling_qk", 0, "float16", 512, "full", "transposed"),
    Choice("tiling_qk", 1, "bfloat16", 64, "band", "transposed"),
    Choice("tiling_qk", 3, "float16-narrow", 512, "full"),
    Choice("tiling_qkv", 0, "bfloat16", 64, "table"),
    Choice("tiling_qkv", 1, "float16-narrow", 32, "full"),
    Choice("tiling_qkv", 2, "float16", 96, "band"),
    Choice("tiling_qkv", 3, "float16", 1024, "full"),
    Choice("tiling_qkv", 1, "float16", 96, "table", "transposed"),
    Choice("tiling_qkv", 4, "float16-narrow", 64, "full", "transposed"),
]


def problems(choice: Choice) -> Iterator[Problem]:
    """Those of its kind of mask; 8-bit ones with factors and without, and as many bytes between
    rows as 16-bit ones; transposed K with a pitch and without."""
    eight = choice.format.startswith("float8")
    factors = itertools.cycle(("head", "none", "tensor") if eight else ("none",))
    pitches = itertools.cycle((16, 0))
    for shape in SHAPES[choice.kind]:
        layouts = {
            name: replace(layout, pitch=2 * layout.pitch, offset=2 * layout.offset)
            for name, layout in shape.items()
            if eight and isinstance(layout, Layout)
        }
        yield Problem(
            **(shape | layouts | stored(choice, next(pitches))),
            head_dim=choice.head_dim,
            dtype=choice.format,
            quantisation=parse_quantisation(next(factors)),
            seed=choice.config,
        )


def stored(choice: Choice, pitch: int) -> dict[str, Any]:
    """Where K lies, unless it is strided: in rows of keys with that pitch."""
    return {} if choice.storage == "strided" else {"layout_k": Transposed(pitch)}


@runs
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_source_computes_attention(choice: Choice, host: Any) -> None:
    variant, config = choice.variant, choice.build[0]
    kernel = host(choice)
    given = problems(choice)
    for problem, kernel.schedule in zip(given, itertools.cycle(SCHEDULES), strict=False):
        assert convict(variant, problem, config, *run(variant, problem, config)) is None, problem


@runs
def test_sums_that_begin_at_zero_are_added(host: Any) -> None:
    """The source as sm_89 compiles it, which keeps few bits of a sum of 8-bit products."""
    choice = Choice("split_q_fp8", 0, "float8_e4m3fn", 64)
    kernel = host(choice, lambda text: text.replace("__CUDA_ARCH__ == 890", "1"))
    problem = next(problems(choice))
    kernel.schedule = SCHEDULES[0]
    result = run(choice.variant, problem, choice.build[0])
    assert convict(choice.variant, problem, choice.build[0], *result) is None


@runs
@pytest.mark.parametrize(
    ("dtype", "head_dim", "bits"),
    [("float8_e4m3fn", 64, 0x7F), ("float8_e5m2", 128, 0xFC)],
    ids=["NaN in e4m3", "infinity in e5m2"],
)
def test_zero_times_what_is_no_number_is_nan(
    dtype: str, head_dim: int, bits: int, host: Any
) -> None:
    """A scale of 0 does not hide NaN or infinity in 8-bit Q, nor do other rows see it."""
    choice = Choice("split_q_fp8", 0, dtype, head_dim)
    host(choice)
    problem = Problem(
        seqlen_q=20, seqlen_kv=40, head_dim=head_dim, dtype=dtype, softmax_scale=0.0, seed=99
    )
    inputs_of(problem)[0].tensor.view(torch.uint8)[0, 0, 3, 5] = bits
    out, lse = run(choice.variant, problem, choice.build[0])
    spoiled = torch.arange(20) == 3
    assert torch.equal(out[0, 0].isnan().all(-1), spoiled)
    assert torch.equal(out[0, 0].isnan().any(-1), spoiled)
    assert torch.equal(lse[0, 0].isnan(), spoiled)


@pytest.mark.skipif(compilable() is not None, reason=f"{compilable()}")
@pytest.mark.skipif(not executables("nvdisasm"), reason="no nvdisasm")
def test_products_of_8_bits_begin_at_zero_on_sm_89_alone() -> None:
    """As declared: promotion after 32 products, where a unit keeps fewer bits than fp32."""
    launch = MODULES["split_q_fp8"].TILING.launch(
        *Choice("split_q_fp8", 0, "float8_e4m3fn", 64).build, narrow=False
    )
    added: dict[str, set[bool]] = {}
    for arch in ("sm_89", "sm_120a"):
        code = listing(compile_source(launch.source, arch).cubin)
        sums = re.findall(r"QMMA\S* \w+, \S+, \S+, (\w+)", code)
        assert sums
        added[arch] = {register != "RZ" for register in sums}
    assert added["sm_89"] == {False}
    assert True in added["sm_120a"]


@runs
@pytest.mark.parametrize("name", MODULES)
def test_no_schedule_changes_a_bit(name: str, host: Any) -> None:
    choice = Choice(name, 0, MODULES[name].VARIANT.support.dtypes[0], 64)
    variant, config = choice.variant, choice.build[0]
    kernel = host(choice)
    problem = Problem(seqlen_q=64, seqlen_kv=200, head_dim=64, dtype=choice.format)
    results = []
    for kernel.schedule in SCHEDULES:
        results.append(run(variant, problem, config))
    assert convict(variant, problem, config, *results[0]) is None
    for out, lse in results[1:]:
        assert torch.equal(out.view(torch.int16), results[0][0].view(torch.int16))
        assert torch.equal(lse.view(torch.int32), results[0][1].view(torch.int32))


# One thing removed or changed, each time, in a tiling that it matters for.  Slips of waiting and of
# barriers show in the schedule that they are open to.  "NAME:3" is config 3 (share-qkv's takes two
# pieces of Q), and "NAME:3:transposed" with such K.

BARRIER = r"__syncthreads\(\);(?=  // {})"
SLIPS = {
    "barrier before Q": ("split_q", BARRIER.format("Q: its"), ""),
    "barrier before an item, ahead": (
        "split_q",
        r"__syncthreads\(\);(?=  // item: all copies have landed, and)",
        "",
    ),
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
    "wait for an item, ahead": ("split_q", r"wait_group<ahead - 1>\(\)", "wait_group<ahead>()"),
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
    "tail of rows": (
        "split_q",
        r"row < a\.seqlen_q && n < out_tiles",
        "row <= a.seqlen_q && n < out_tiles",
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


@runs
@pytest.mark.parametrize("name", SLIPS)
def test_every_slip_is_seen(name: str, host: Any) -> None:
    """By the bound, by what lies around the outputs, or by bank conflicts."""
    tiling, pattern, instead = SLIPS[name]

    def slip(text: str) -> str:
        slipped, count = re.subn(pattern, instead, text)
        assert count == 1
        return slipped

    tiling, _, index = tiling.partition(":")
    index, _, storage = index.partition(":")
    mask = MASKED.get(name, Full())
    eight = tiling == "split_q_fp8"
    dtype = "float8_e4m3fn" if eight else "float16"
    head_dim = SLIP_HEAD_DIMS.get(name, 64)
    kind = "band" if name in MASKED else "full"
    choice = Choice(tiling, int(index or 0), dtype, head_dim, kind, storage or "strided")
    variant, config = choice.variant, choice.build[0]
    kernel = host(choice, slip)
    problem = Problem(
        heads_q=4,
        heads_kv=2,
        seqlen_q=63,
        seqlen_kv=197 if storage else 200,  # a row of keys ends inside 16 bytes
        head_dim=head_dim,
        dtype=dtype,
        mask=mask,
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


# Refusals.


def arguments(**changes: Any) -> AttentionArgs:
    q = torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    given = {
        "q": q,
        "k": q,
        "v": q,
        "mask": Full(),
        "softmax_scale": 0.125,
        "score_mod": None,
        "config": split_q.CONFIGS[0],
    }
    return AttentionArgs(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"config": Config(block_m=64, block_n=16, num_warps=4, num_stages=2)}, "config"),
        ({"k": torch.zeros(1, 1, 8, 65, dtype=torch.float16)[..., 1:]}, "layout_k"),
        ({"v": torch.zeros(1, 1, 64, 8, dtype=torch.float16).mT}, "layout_v"),
        ({"score_mod": Softcap(1.0)}, "softcap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_outside_the_support_is_refused(changes: dict[str, Any], argument: str) -> None:
    out = torch.full((1, 1, 8, 64), 7.0, dtype=torch.float16)
    assert split_q.VARIANT.forward is not None
    with pytest.raises(Unsupported) as refusal:
        split_q.VARIANT.forward(arguments(**changes), out, torch.zeros(1, 1, 8), {})
    assert refusal.value.argument == argument
    assert (out == 7.0).all()
