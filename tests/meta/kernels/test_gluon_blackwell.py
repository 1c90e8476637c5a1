"""The Gluon forward for Blackwell without a GPU: what it computes when Python runs its partitions
in drawn orders, slips that must show in one of them, its builds, and that it was never run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton

from kernels.gluon import blackwell_forward as kernel
from kernels.gluon import partitions
from kernels.gluon.host import SHARED_BYTES
from kernels.triton import compile as triton_compile
from tests.harness.gluon_host import Host, convicted_by_bound
from tests.harness.gluon_partitions import PartitionError, Partitions
from verify.cuda.edits import Edit
from verify.cuda.sass import listing
from verify.problem import Problem
from verify.problem.inputs import tensors
from verify.variant import AttentionArgs, Config, Unsupported, compiled_archs

pytestmark = pytest.mark.for_ci

torch.set_num_threads(1)

WIDE, NARROW = kernel.VARIANT.configs
TINY = Config(block_m=8, block_n=8, num_warps=4, num_stages=2)  # for the model alone


def host_of(*edits: Edit, seed: int = 0) -> Host:
    return Host(*edits, kernel="blackwell_forward", machine=Partitions(seed=seed))


def verdict(made: Host, text: str, config: Config) -> str | None:
    """What is wrong with O and LSE, or None: the judge's bound for tcgen05, and empty rows."""
    return convicted_by_bound(made, kernel.VARIANT, Problem.parse(text), config, arch="sm_100a")


@pytest.mark.parametrize(
    "text",
    [
        "sq=1,skv=1,d=8",
        "b=2,hq=4,hkv=2,sq=130,skv=200,d=40,mask=causal",
        "sq=70,skv=131,d=64,mask=causal.tl,scale=-0.3",
        "hq=2,hkv=1,sq=131,skv=300,d=64,dv=128,mask=window.70.3",
        "b=2,sq=130,skv=140,d=64,mask=lengths.130_40.7_140",
        "sq=200,skv=200,d=64,mask=documents.30_100_70+window.20.0",
        "sq=100,skv=260,d=136,mask=prefix.70",
        "sq=5,skv=0,d=64",
        "sq=300,skv=70,d=64,mask=causal",
        "b=2,hq=2,hkv=1,sq=66,skv=65,d=64,lq=bshd.p8,lk=sbhd.o8,lv=bhsd.p16.xb,lo=bshd.p8.o8",
        "sq=140,skv=257,d=64,mask=causal,dist=increasing",
    ],
)
def test_its_text_stays_inside_its_bounds(text: str) -> None:
    """And writes no element beside O and LSE, which `run` asserts."""
    for config, dtype in ((WIDE, "bfloat16"), (NARROW, "float16")):
        assert verdict(host_of(), f"{text},dtype={dtype}", config) is None


WALK = "sq=16,skv=43,d=8,dtype=float16,mask=causal"  # four to six blocks, in two tiles
SEEDS = range(12)


def test_no_drawn_order_changes_the_result() -> None:
    for seed in SEEDS:
        assert verdict(host_of(seed=seed), WALK, TINY) is None
    for seed in (1, 2, 3):
        assert verdict(host_of(seed=seed), *ONE_SIDE) is None


def arguments(problem: Problem, config: Config) -> AttentionArgs:
    inputs = tensors(problem)
    return AttentionArgs(
        inputs.q, inputs.k, inputs.v, problem.mask, problem.scale, problem.score_mod, config
    )


def test_values_that_no_row_of_a_tile_sees_are_hidden() -> None:
    """NaN in V behind the last visible key reaches nothing, whenever its tile comes."""
    problem = Problem.parse("sq=4,skv=100,d=64,dtype=float16,mask=window.3.0.tl")
    hidden = Edit(r"    hide\(v_ring[^\n]*", "    pass")
    early = Edit(r"slot = await_tile\(v_here, t, STAGES\)\n( +hide)", r"slot = t % STAGES\n\1")
    finite = {}
    for name, edits in (("shipped", ()), ("shown", (hidden,)), ("hidden early", (early,))):
        for seed in range(6) if name != "hidden early" else range(30):
            args = arguments(problem, TINY)
            args.v[:, :, 4:] = math.nan
            out, lse = torch.empty(problem.shape_out, dtype=torch.float16), torch.empty(1, 1, 4)
            host_of(*edits, seed=seed).forward(args, out, lse, {})
            finite[name] = finite.get(name, True) and bool(out.isfinite().all())
    assert finite == {"shipped": True, "shown": False, "hidden early": False}


# What is changed.
SLIPS: dict[str, Edit] = {
    "no wait for Q": Edit(r"mbarrier\.wait\(q_here[^\n]*", "pass"),
    "no wait for K": Edit(r"await_tile\(k_here, n, STAGES\)", "n % STAGES"),
    "no wait for P": Edit(r"await_tile\(p_here, t, 1\)", "pass"),
    "no wait for S": Edit(r"await_tile\(s_here, t, SIDES\)", "t % SIDES"),
    "no wait for O": Edit(r"await_tile\(o_here, t - 1, 1\)", "pass"),
    "no wait for the last O": Edit(r"await_tile\(o_here, total - 1, 1\)", "pass"),
    "S over one that is read": Edit(r"await_free\(s_free, n, SIDES\)", "n % SIDES"),
    "K over one that is read": Edit(r"await_free\(k_free, t, STAGES\)", "t % STAGES"),
    "V over one that is read": Edit(r"await_free\(v_free, t, STAGES\)", "t % STAGES"),
    "no arrival for S": Edit(r"mbarrier\.arrive\(s_free[^\n]*", "pass"),
    "no arrival for P": Edit(r"mbarrier\.arrive\(p_here[^\n]*", "pass"),
    "an arrival too many": Edit(
        r"mbarriers=\[o_here\.index\(0\)", "mbarriers=[o_here.index(0), o_here.index(0)"
    ),
    "no arrival for V": Edit(r", v_free\.index\(slot\)\]", "]"),
    "a free slot waits for its first tile": Edit(r"& 1\) \^ 1\)", "& 1))"),
    "P over one that is read": Edit(
        r"(?s)(        if t > 0:\n            await_tile\(o_here.*?store\(acc\)\n)"
        r"(        p_memory\.store[^\n]*\n)",
        r"\2\1",
    ),
    "O as it was": Edit(r"use_acc=t > 0", "use_acc=True"),
    "the first O alone": Edit(r"use_acc=t > 0", "use_acc=False"),
    "O not rescaled": Edit(r"o_memory\.store\(acc\)", "pass"),
    "an end while products read": Edit(r"gl\.maximum\(total - STAGES, 0\)", "total"),
    "barriers of P not opened": Edit(r"open_ring\(p_here, 1\)", "pass"),
}


# Where tensor memory holds one tile of S alone; two are never both unread when a third is begun.
ONE_SIDE = ("sq=16,skv=300,d=256,dtype=float16", WIDE)


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_shows_in_some_order(slip: str) -> None:
    found = []
    for seed in SEEDS:
        try:
            text, config = ONE_SIDE if slip == "S over one that is read" else (WALK, TINY)
            found.append(verdict(host_of(SLIPS[slip], seed=seed), text, config))
        except PartitionError as error:
            found.append(str(error))
        if found[-1] is not None:
            return
    pytest.fail("it computes the right numbers in every drawn order")


# Builds, and what is said of them.


@pytest.fixture(autouse=True, scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def test_builds_are_for_blackwell_alone() -> None:
    names = {arch: [build.name for build in kernel.builds(arch)] for arch in compiled_archs()}
    assert [arch for arch, listed in names.items() if listed] == ["sm_100a"]
    parts = {part for name in names["sm_100a"] for part in name.split(", ")}
    configs = {config.name for config in kernel.VARIANT.configs}
    buckets = {f"d {bucket}" for bucket in kernel.BUCKETS}
    kinds = set(triton_compile.MASKS)
    assert parts == configs | buckets | kinds | set(kernel.SUPPORT.dtypes)
    assert set(kernel._SPILL_BUDGETS) <= set(names["sm_100a"])


def test_shared_and_tensor_memory_hold_the_tiles() -> None:
    for config in kernel.VARIANT.configs:
        for bucket in kernel.BUCKETS:
            blocks = kernel.effective_blocks(config, bucket)
            assert blocks.num_stages >= 1
            assert blocks.block_n == config.block_n  # the bound counts its blocks
            tiles = blocks.block_m + 2 * blocks.num_stages * blocks.block_n
            assert 2 * bucket * tiles <= SHARED_BYTES - 1024
            assert kernel.columns(blocks.block_n, bucket, 1) <= kernel.COLUMNS


def test_a_build_has_blackwells_instructions() -> None:
    if kernel.uncompilable() is not None:
        pytest.skip(f"{kernel.VARIANT.name}: {kernel.uncompilable()}")
    (build,) = (b for b in kernel.builds("sm_100a") if b.name.endswith("d 64, full"))
    made = build.compile()
    assert made.resources.shared <= SHARED_BYTES
    text = listing(made.cubin)
    counts = {w: len(re.findall(rf" {w}[ .]", text)) for w in ("UTCHMMA", "UTMALDG", "LDL", "STL")}
    counts["UTCMMA"] = counts.pop("UTCHMMA")
    assert not list(build.broken(made.resources, counts))
    for word in ("LDTM", "STTM", "UTCBAR", "USETMAXREG"):  # tensor memory, commits, partitions
        assert re.search(rf" {word}[ .]", text), word


def test_it_says_that_it_was_compiled_and_never_run() -> None:
    """As `verify list` and the reports show it, where there is no such device."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10:
        assert kernel.VARIANT.describe()["unavailable"] is None
        return
    said = kernel.VARIANT.describe()["unavailable"]
    assert said == "compiled, never run: no device of compute capability 10.x was at hand"


def test_without_tensor_memory_in_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "get_tmem_reg_layout", None)
    assert "has no tensor memory as it is in 3.7" in str(kernel.uncompilable())
    args: Any = arguments(Problem.parse("sq=4,skv=4,d=64,dtype=float16"), WIDE)
    with pytest.raises(Unsupported, match=r"as it is in 3\.7"):
        kernel.forward(args, torch.empty(1, 1, 4, 64, dtype=torch.float16), None, {})
