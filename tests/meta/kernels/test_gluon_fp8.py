"""The Gluon forward of 8-bit inputs without a GPU: what it refuses, what it computes when Python
runs its text, how it adds up, and its builds for sm_90a."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from kernels.gluon import hopper_fp8_forward as kernel
from kernels.gluon.host import SHARED_BYTES
from kernels.triton import fp8_transposed_forward
from kernels.triton.compile import MASKS
from tests.harness.fake_trials import acquitted, convicted
from tests.harness.gluon_host import Host, convicted_by_bound
from tests.harness.in_process import declared, trial
from tests.planted import gluon_fp8_forward
from verify.arithmetic.mma import unit_for
from verify.cuda.edits import Edit
from verify.cuda.sass import listing
from verify.judging.findings import Ruling
from verify.oracles.numerics import oracle as declared_numerics
from verify.problem import Problem
from verify.problem.inputs import tensors
from verify.problem.storage.transposed import TransposedV
from verify.variant import AttentionArgs, Build, Config, Stored, Unsupported, compiled_archs

torch.set_num_threads(1)

FAST, DEEP, WIDE, SMALL, ALONE = kernel.VARIANT.configs
E4M3, E5M2 = kernel.SUPPORT.dtypes
COLUMNS = TransposedV(16)


def host_of(*edits: Edit) -> Host:
    return Host(*edits, kernel="hopper_fp8_forward")


@cache
def host() -> Host:
    return host_of()


def problem_of(text: str) -> Problem:
    problem = Problem.parse(text)
    return problem if "lv=" in text else replace(problem, layout_v=COLUMNS)


def verdict(made: Host, text: str, config: Config) -> str | None:
    """What is wrong with O and LSE, or None: the judge's bound for wgmma, and empty rows."""
    return convicted_by_bound(made, kernel.VARIANT, problem_of(text), config)


# Support.


def given(problem: Problem, config: Config = SMALL) -> AttentionArgs:
    """Arguments whose V lies in columns."""
    inputs = tensors(problem)
    batch, heads, keys, dims = problem.shape_v
    room = torch.zeros(batch, heads, dims, keys + -keys % 16, dtype=inputs.v.dtype)
    columns = room[..., :keys]
    columns.copy_(inputs.v.mT)
    return AttentionArgs(
        *(inputs.q, inputs.k, inputs.v, problem.mask, problem.scale, problem.score_mod, config),
        stored={"v": Stored("transposedv", "transposedv", {"": columns}, ("v",))},
    )


PLAIN = problem_of(f"sq=4,skv=20,d=64,dtype={E4M3}")


@pytest.mark.parametrize(
    ("changed", "argument", "says"),
    [
        ({"dtype": "float16"}, "dtype", "float16 is none of"),
        ({"head_dim": 144}, "head_dim", "144 is not supported"),
        ({"head_dim_v": 24}, "head_dim_v", "24 is not supported"),
    ],
)
def test_what_it_does_not_support_it_refuses(
    changed: dict[str, Any], argument: str, says: str
) -> None:
    problem = replace(PLAIN, **changed)
    out = torch.full(problem.shape_out, 7.0, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match=says) as error:
        kernel.forward(given(problem), out, None, {})
    assert error.value.argument == argument
    assert bool((out == 7.0).all())


def test_v_by_rows_and_columns_that_are_not_aligned_it_refuses() -> None:
    args = given(PLAIN)
    out = torch.empty(PLAIN.shape_out, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match="strided storage is none of transposedv"):
        kernel.forward(replace(args, stored={}), out, None, {})
    odd = torch.zeros(1, 1, 64, 24, dtype=args.q.dtype)[..., :20]
    stored = {"v": Stored("transposedv", "transposedv", {"": odd}, ("v",))}
    with pytest.raises(Unsupported, match="multiples of 16 bytes"):
        kernel.forward(replace(args, stored=stored), out, None, {})


def test_shared_memory_holds_the_ring() -> None:
    for config in kernel.VARIANT.configs:
        for bucket in kernel.BUCKETS:
            blocks = kernel.effective_blocks(config, bucket)
            tiles = blocks.block_m + 2 * blocks.num_stages * blocks.block_n
            assert bucket * tiles + 8 * (2 * blocks.num_stages + 1) <= SHARED_BYTES
            assert blocks.num_stages == config.num_stages


def test_it_declares_the_arithmetic_of_the_triton_kernel_but_for_the_instruction() -> None:
    block = fp8_transposed_forward.VARIANTS[1].numerics
    own = kernel.VARIANT.numerics
    instruction = own.products.instruction
    assert instruction == "wgmma"
    assert replace(own.products, instruction=block.products.instruction) == block.products
    assert own.softmax.scale_roundings == block.softmax.scale_roundings == 3
    assert own.output == replace(block.output, probability="input")


# What it computes.


@pytest.mark.first_look(3)
@pytest.mark.parametrize(
    "text",
    [
        "sq=1,skv=1,d=16",
        "b=2,hq=4,hkv=2,sq=130,skv=200,d=48,mask=causal,descale=head",
        "sq=70,skv=131,d=64,mask=causal.tl,scale=-0.3,descale=tensor",
        "hq=2,hkv=1,sq=131,skv=300,d=64,dv=128,mask=window.70.3",
        "b=2,sq=130,skv=140,d=64,dv=32,mask=lengths.130_40.7_140,descale=head,out=float16",
        "sq=200,skv=200,d=64,mask=documents.30_100_70+window.20.0",
        "sq=100,skv=260,d=112,mask=prefix.70,out=float16",
        "sq=5,skv=0,d=64",
        "sq=70,skv=3,d=64,mask=causal",
        "b=2,hq=2,hkv=1,sq=66,skv=65,d=64,lq=bshd.p16,lk=sbhd.o16,lo=bshd.p8.o8",
        "b=2,hq=2,hkv=2,sq=66,skv=65,d=64,lq=bhsd.xh,lk=bhsd.xh,lv=transposedv",
        "b=2,hq=2,hkv=2,sq=66,skv=130,d=64,lq=bhsd.xbh,lk=bhsd.xbh,lv=transposedv",
        "sq=140,skv=257,d=64,mask=causal,dist=increasing,lv=transposedv.p64",
        "sq=70,skv=200,d=64,mask=causal,scale=0.0",
    ],
)
def test_its_text_stays_inside_its_bounds(text: str) -> None:
    """And writes no element beside O and LSE, which `run` asserts; NaN lies beside the inputs."""
    each = ((FAST, E4M3), (DEEP, E5M2), (WIDE, E4M3), (SMALL, E4M3), (ALONE, E5M2))
    for config, dtype in each:
        assert verdict(host(), f"{text},dtype={dtype}", config) is None


FAULTY = f"b=2,hq=4,hkv=2,sq=70,skv=200,d=64,mask=causal,scale=-0.2,descale=head,dtype={E4M3}"
FAULTS = {
    "no factor of k": Edit(r"factor = factor \* descale\(.*, 1\)", "pass"),
    "the factor of k for v": Edit(r"batch, head64, 2\)", "batch, head64, 1)"),
    "the factor of another head": Edit(
        r"head64 = head_kv\.to\(gl\.int64\)", "head64 = (head_kv + 1) % 2"
    ),
    "P not scaled": Edit(r"\(8\.0 - shift\)\[:, None\]", "-shift[:, None]", 2),
    "O scaled": Edit(r"factor_v = 0\.00390625", "factor_v = 1.0"),
    "the sum scaled": Edit(r"l \* 0\.00390625", "l"),
    "O not shrunk": Edit(r"gl\.fma\(acc, gl\.convert_layout\([^\n]*, o\)\n", "acc + o\n", 2),
    "shrunk by the next block": Edit(
        r"shrink = alpha\n( +)(top[^\n]*)\n", r"\2\n\1shrink = alpha\n"
    ),
    "no wait for S": Edit(r"wait\(1, deps=\(s,\)\)", "wait(2, deps=(s,))"),
    "the last block alone": Edit(r"acc = gl\.fma\(acc, [^\n]*shrink[^\n]*\n", "acc = o\n"),
    "V a block on": Edit(
        r"fetch_columns\(v, batch32, head_kv, ahead",
        "fetch_columns(v, batch32, head_kv, ahead + 64",
    ),
    "a negative scale's maximum": Edit(r"s = s \* sign", "pass"),
    "the order of keys forgotten": Edit(r"gl\.convert_layout\(in_order\(p\), LAYOUT\)", "p"),
    "the mask in the order of columns": Edit(
        r"(?m)^ +column = column % [^\n]*\n", "            pass\n"
    ),
    "odd rows first": Edit(r"\(0, row // 2, 0\)", "(1, row // 2, 0)"),
    "V by another head": Edit(
        r"fetch_columns\(v, batch32, head_kv,", "fetch_columns(v, batch32, 1 - head_kv,", 2
    ),
}


@pytest.mark.first_look(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_leaves_the_bounds(fault: str) -> None:
    assert verdict(host(), FAULTY, SMALL) is None
    assert verdict(host_of(FAULTS[fault]), FAULTY, SMALL) is not None


@pytest.mark.parametrize(
    ("text", "unseen"),
    [
        ("skv=100,mask=lengths.9.40+window.3.0.tl", slice(9, None)),
        ("skv=100,mask=lengths.9.70", slice(70, None)),  # in the second block
        ("skv=200,mask=window.80.0", slice(0, 111)),  # before the loop's last block
    ],
)
def test_values_that_no_row_of_a_tile_sees_are_hidden(text: str, unseen: slice) -> None:
    """NaN in V before and behind the visible keys reaches nothing."""
    problem = problem_of(f"sq=9,{text},d=64,dtype={E4M3}")
    args = given(problem)
    out, lse = torch.empty(problem.shape_out, dtype=torch.bfloat16), torch.empty(1, 1, 9)
    args.stored["v"].tensors[""][..., unseen] = math.nan
    host().forward(args, out, lse, {})
    assert bool(out.isfinite().all())
    host_of(Edit(r" hide_columns\(v_tile, nth_block[^\n]*", " pass", 2)).forward(args, out, lse, {})
    assert bool(out.isnan().any())


# How it adds up.


def numerics_of(made: Host, config: Config, dtype: str) -> Ruling:
    """The oracle of declared numerics on the text, whose wgmma adds as Hopper's does."""
    made.machine.unit = unit_for("sm_90", dtype, instruction="wgmma")
    declaration = replace(
        declared(kernel.VARIANT.contract, kernel.VARIANT.numerics, dtypes=(dtype,)),
        support=replace(kernel.SUPPORT, head_dims=(64,)),
        configs=(config,),
    )

    def run_given(problem: Problem, tensors_: Mapping[str, Tensor]) -> dict[str, Tensor]:
        args = given(problem, config)
        columns = args.stored["v"].tensors[""]
        columns.copy_(tensors_["v"].mT)
        args = replace(args, q=tensors_["q"], k=tensors_["k"], v=tensors_["v"])
        out = torch.empty(problem.shape_out, dtype=problem.format_out.torch)
        lse = torch.empty(problem.shape_out[:3])
        made.forward(args, out, lse, {})
        return {"out": out, "lse": lse}

    (problem,) = declared_numerics.asks(declaration, dtype)
    return declared_numerics.judge(trial(run_given, problem, declaration, "sm_90"))


@pytest.mark.parametrize(("config", "every"), [(SMALL, 64), (ALONE, 128)])
def test_it_adds_up_as_declared(config: Config, every: int) -> None:
    ruling = numerics_of(host_of(), config, E4M3)
    assert acquitted(ruling)
    assert ruling.observed["accumulator of P V"] == f"13 fraction bits, promoted every {every}"
    assert ruling.observed["P"] == E4M3


@pytest.mark.parametrize(("config", "every"), [(SMALL, 64), (ALONE, 128)])
def test_sums_that_are_never_promoted_are_named(config: Config, every: int) -> None:
    """Blocks chained through wgmma's own 13 bits."""
    chained = host_of(*gluon_fp8_forward.SLIPS["chained-sums"].edits)
    ruling = numerics_of(chained, config, E4M3)
    convicted(ruling, f"promoted every {every}", "13 fraction bits, never promoted")


# Planted copies; "chained-sums" is convicted above.


@pytest.mark.parametrize("slip", ["mask-bound", "wrong-factor"])
def test_planted_wrong_results_leave_the_bounds(slip: str) -> None:
    assert verdict(host_of(*gluon_fp8_forward.SLIPS[slip].edits), FAULTY, ALONE) is not None


@cache
def shipped_cubin(*choice: Any) -> bytes:
    """The kernel's own binary, assembled once for all copies."""
    return kernel._compile(*choice).cubin


@pytest.mark.for_ci
@pytest.mark.parametrize("slip", gluon_fp8_forward.SLIPS)
def test_planted_copies_compile_and_differ(slip: str) -> None:
    copies = gluon_fp8_forward.COPIES
    assert copies.config is ALONE  # whose one slot the planted refill needs
    copy = copies.copy_of(slip)
    assert copy.fetch_columns.__module__.startswith("planted_gluon_fp8_")
    assert copy.store_lse.__module__.startswith("planted_gluon_fp8_")
    choice = copies.config, E4M3, 128, "causal", "bfloat16", "sm_90a"
    assert copy._compile(*choice).cubin != shipped_cubin(*choice)


# Builds.


@pytest.fixture(autouse=True, scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def test_builds_are_for_hopper_alone() -> None:
    names = {arch: [build.name for build in kernel.builds(arch)] for arch in compiled_archs()}
    assert [arch for arch, listed in names.items() if listed] == ["sm_90a"]
    parts = {part for name in names["sm_90a"] for part in name.split(", ")}
    configs = {config.name for config in kernel.VARIANT.configs}
    buckets = {f"d {bucket}" for bucket in kernel.BUCKETS}
    outputs = {"out bfloat16", "out float16"}
    assert parts == configs | buckets | set(MASKS) | {E4M3, E5M2} | outputs | {"odd"}


def build_named(start: str) -> Build:
    (build,) = (build for build in kernel.builds("sm_90a") if build.name.startswith(start))
    return build


@pytest.mark.for_ci
@pytest.mark.parametrize(
    ("name", "products"),
    [
        # 32 deep: S over dims and P V over keys, each in the loop and outside.
        ("m128n64w8s4, float8_e4m3fn, d 128, full", 2 * (128 // 32 + 64 // 32)),
        ("m64n128w4s1, float8_e5m2, d 64, full", 2 * (64 // 32 + 128 // 32)),
    ],
)
def test_a_build_keeps_its_budgets_and_has_hoppers_instructions(name: str, products: int) -> None:
    build = build_named(name)
    made = build.compile()
    assert made.resources.shared <= SHARED_BYTES
    text = listing(made.cubin)
    counts = {word: len(re.findall(rf" {word}[ .]", text)) for word in ("QGMMA", "UTMALDG")}
    assert not list(build.broken(made.resources, counts))
    assert counts["QGMMA"] == products
    assert " HGMMA" not in text
    assert ("E5M2" if "e5m2" in name else "E4M3") in text
    assert " SYNCS.PHASECHK" in text
    assert "WARPGROUP.DEPBAR" in text


@pytest.mark.for_ci
def test_even_rows_first_spare_the_exchange_of_p_between_lanes() -> None:
    """Rows are reduced by SHFL.BFLY; P is exchanged by SHFL.IDX, in the loop and behind it."""
    choice = FAST, E4M3, 128, "full", "bfloat16", "sm_90a"
    texts = {odd: listing(kernel._compile(*choice, odd=odd).cubin) for odd in (False, True)}
    assert {odd: text.count(" SHFL.IDX ") for odd, text in texts.items()} == {False: 0, True: 32}
