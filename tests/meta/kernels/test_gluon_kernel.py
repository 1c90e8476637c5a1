"""The Gluon kernel without a GPU: what it refuses, what it hands to the copy engine, what it
computes when Python runs its text, and its builds for sm_90a."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from kernels.gluon import hopper_forward as kernel
from kernels.gluon.host import SHARED_BYTES
from kernels.masks import mask_build, mask_tables
from kernels.triton import compile as triton_compile
from references.masks import parse_mask
from references.score_mods import Softcap
from tests.harness.gluon_host import Host, convicted_by_bound
from tests.harness.gluon_values import Place
from tests.planted import gluon_forward
from tests.properties import tier
from verify.cuda.edits import Edit
from verify.cuda.sass import listing
from verify.problem import Problem
from verify.problem.inputs import tensors
from verify.variant import AttentionArgs, Build, Unsupported, arch_named, compiled_archs

torch.set_num_threads(1)

TALL, NARROW, SMALL, ALONE, _ = kernel.VARIANT.configs
PLAIN = Problem(seqlen_q=4, seqlen_kv=4, head_dim=64, dtype="float16")


def arguments(problem: Problem) -> AttentionArgs:
    inputs = tensors(problem)
    return AttentionArgs(
        inputs.q, inputs.k, inputs.v, problem.mask, problem.scale, problem.score_mod, TALL
    )


# Support.


def refused(args: AttentionArgs, out: Tensor, argument: str, says: str) -> None:
    """The entry point refuses before it writes."""
    lse = torch.full(out.shape[:3], 7.0)
    out.fill_(7.0)
    with pytest.raises(Unsupported, match=says) as error:
        kernel.forward(args, out, lse, {})
    assert error.value.argument == argument
    assert bool((out == 7.0).all() and (lse == 7.0).all())


@pytest.mark.parametrize(
    ("problem", "argument", "says"),
    [
        (replace(PLAIN, dtype="float32"), "dtype", "float32 is none of float16, bfloat16"),
        (replace(PLAIN, head_dim=60), "head_dim", "60 is not supported"),
        (replace(PLAIN, head_dim=264), "head_dim", "264 is not supported"),
        (replace(PLAIN, head_dim_v=4), "head_dim_v", "4 is not supported"),
        (replace(PLAIN, score_mod=Softcap(1.0)), "softcap", "is not supported"),
    ],
)
def test_what_it_does_not_support_it_refuses(problem: Problem, argument: str, says: str) -> None:
    args = arguments(problem)
    refused(args, torch.empty(problem.shape_out, dtype=args.q.dtype), argument, says)


def test_layouts_that_the_copy_engine_does_not_take_it_refuses() -> None:
    args = arguments(PLAIN)
    out = torch.empty(1, 1, 4, 64, dtype=torch.float16)
    odd = torch.ones(1, 1, 4, 68, dtype=torch.float16)[..., :64]  # rows of 136 bytes
    late = torch.ones(1, 1, 4, 72, dtype=torch.float16)[..., 1:65]
    across = torch.ones(1, 1, 64, 8, dtype=torch.float16)[..., :4].mT
    rows = "rows do not begin at multiples of 16 bytes"
    for layout, says in ((odd, rows), (late, rows), (across, "head_dim must be innermost")):
        for name in ("q", "k", "v"):
            refused(replace(args, **{name: layout}), out, f"layout_{name}", says)
    for layout, says in ((odd, rows), (across, "head_dim must be innermost")):
        refused(args, layout, "layout_out", says)
    repeated = torch.ones(1, 1, 1, 64, dtype=torch.float16).expand(1, 1, 4, 64)
    for name in ("q", "k", "v"):
        refused(replace(args, **{name: repeated}), out, f"layout_{name}", "cannot repeat a row")


def test_it_runs_on_hopper_alone() -> None:
    support = kernel.SUPPORT
    assert support.capability == support.max_capability == arch_named("sm_90a").capability
    assert support.devices == ("cuda",)


# What the host hands over.


@pytest.mark.parametrize("layout", ["", ",lk=sbhd.o8", ",lk=bhsd.p16.xb", ",lk=bshd.p8.xh"])
@pytest.mark.parametrize("shape", ["b=2,hq=4,hkv=2,sq=9,skv=70,d=40", "sq=1,skv=1,d=256,dv=8"])
def test_descriptors_keep_the_rules_of_tensor_maps(shape: str, layout: str) -> None:
    """Those of cuTensorMapEncodeTiled: dimensions, strides, and a box of at most 256 elements on a
    side. Triton cuts the innermost into pieces of 128 bytes."""
    problem = Problem.parse(f"{shape},dtype=float16{layout}")
    inputs = tensors(problem)
    for name, rows in (("q", 128), ("k", 64), ("v", 64)):
        tensor = getattr(inputs, name).expand(problem.shapes[name])
        made = kernel.descriptor(name, tensor, rows, 256)
        assert all(1 <= size <= 2**32 for size in made.shape)
        assert all(0 < 2 * step < 2**40 and step % 8 == 0 for step in made.strides[:3])
        assert made.strides[3] == 1
        assert made.shape[3] == tensor.shape[3]
        assert max(made.block_shape[:3]) <= 256
        for size, stored, step in zip(tensor.shape, made.shape, tensor.stride(), strict=True):
            assert stored in (size, 1)
            assert (stored == size) or step == 0


def test_shared_memory_holds_the_ring() -> None:
    """Tiles and barriers fit; STAGES are those of the config where they can be, and never none."""
    stages = {}
    for config in kernel.VARIANT.configs:
        for bucket in kernel.BUCKETS:
            blocks = kernel.effective_blocks(config, bucket)
            tiles = blocks.block_m + 2 * blocks.num_stages * blocks.block_n
            assert 2 * bucket * tiles + 8 * (2 * blocks.num_stages + 1) <= SHARED_BYTES
            stages[config.name, bucket] = blocks.num_stages
    assert set(stages.values()) == {1, 2, 3}
    assert stages[TALL.name, 256] == 1
    assert gluon_forward.COPIES.config is TALL  # whose one slot the planted refill needs


MASKS = (
    "full",
    "causal",
    "causal.tl",
    "window.20.0",
    "window.3.5.tl",
    "window.0.inf",
    "lengths.50_0.64_9",
    "documents.30_1_0_40",
    "prefix.21",
    "causal+lengths.9_70.3_64",
    "documents.30_40+window.7.7",
)
LENGTHS = ((70, 70), (9, 130), (130, 9), (1, 64))


@cache
def host() -> Host:
    return Host()


@pytest.mark.parametrize("name", MASKS)
def test_the_walk_takes_every_visible_block_once(name: str) -> None:
    """Blocks before the edges are seen whole by each row; each row sees [low, high) of them; what
    lies outside [first, last) is seen by none."""
    tiles, fakes = host().fakes["tiles"], host().kernel
    block_m, block_n = 32, 16
    for seqlen_q, seqlen_kv in LENGTHS:
        problem = Problem(
            batch=2,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            head_dim=8,
            dtype="float16",
            mask=parse_mask(name),
        )
        dense = problem.mask.dense(2, 1, seqlen_q, seqlen_kv).expand(2, 1, seqlen_q, seqlen_kv)
        args = arguments(problem)
        mask = mask_build(args)
        tables = tuple(Place.of(t) if t is not None else None for t in mask_tables(args, mask))
        sizes = seqlen_q, seqlen_kv, mask.diagonal_low, mask.diagonal_high
        for batch in range(2):
            for start in range(0, seqlen_q, block_m):
                row = torch.arange(start, start + block_m).clamp(max=seqlen_q - 1)
                low, high = tiles.seen_keys(row, tables, batch, sizes, mask.kind)
                keys = torch.arange(seqlen_kv)
                seen = (keys >= low[:, None]) & (keys < high[:, None])
                assert torch.equal(seen, dense[batch, 0][row])
                first, last, walk = tiles.key_walk(low, high, seqlen_kv, block_n)
                counts = [tiles.blocks_of(walk, edge) for edge in range(2)]
                order = [fakes.nth_block(walk, t) for t in range(sum(counts))]
                assert len(set(order)) == len(order)
                needed = {int(key) // block_n for key in seen.any(0).nonzero()}
                assert needed <= set(order)
                for block in order[: counts[0]]:
                    assert bool(seen[:, block * block_n : (block + 1) * block_n].all())
                    assert (block + 1) * block_n <= seqlen_kv
                assert not seen[:, :first].any()
                assert not seen[:, last:].any()


# What it computes.


def verdict(made: Host, text: str, config: Any) -> str | None:
    """What is wrong with O and LSE, or None: the judge's bound for wgmma, and empty rows."""
    return convicted_by_bound(made, kernel.VARIANT, Problem.parse(text), config)


@pytest.mark.first_look(3)
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
        "sq=70,skv=3,d=64,mask=causal",
        "b=2,hq=2,hkv=1,sq=66,skv=65,d=64,lq=bshd.p8,lk=sbhd.o8,lv=bhsd.p16.xb,lo=bshd.p8.o8",
        "b=2,hq=2,hkv=2,sq=66,skv=65,d=64,lq=bhsd.xh,lk=bhsd.xh,lv=bhsd.xb",
        "sq=140,skv=257,d=64,mask=causal,dist=increasing",
    ],
)
def test_its_text_stays_inside_its_bounds(text: str) -> None:
    """And writes no element beside O and LSE, which `run` asserts."""
    for config, dtype in (
        (TALL, "bfloat16"),
        (NARROW, "float16"),
        (SMALL, "float16"),
        (ALONE, "bfloat16"),
    ):
        assert verdict(host(), f"{text},dtype={dtype}", config) is None


@pytest.mark.parametrize(
    ("text", "unseen"),
    [
        ("skv=100,mask=window.3.0.tl", slice(9, None)),
        ("skv=100,mask=lengths.9.70", slice(70, None)),  # in the second block
        ("skv=200,mask=window.80.0", slice(0, 111)),  # before the loop's last block
    ],
)
def test_values_that_no_row_of_a_tile_sees_are_hidden(text: str, unseen: slice) -> None:
    """NaN in V before and behind the visible keys reaches nothing."""
    problem = Problem.parse(f"sq=9,{text},d=64,dtype=float16")
    args = replace(arguments(problem), config=SMALL)
    out, lse = torch.empty(problem.shape_out, dtype=torch.float16), torch.empty(1, 1, 9)
    args.v[:, :, unseen] = math.nan
    host().forward(args, out, lse, {})
    assert bool(out.isfinite().all())
    shown = Host(Edit(r"hide\(v_tile, nth_block[^\n]*", "pass", times=2))
    shown.forward(args, out, lse, {})
    assert bool(out.isnan().any())


def test_the_planted_mask_shows() -> None:
    wrong = Host(*gluon_forward.SLIPS["mask-bound"].edits)
    text = "sq=130,skv=130,d=64,dtype=float16,mask=causal"
    assert verdict(host(), text, SMALL) is None
    assert verdict(wrong, text, SMALL) is not None


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
    configs = {config.name for config in kernel.CONFIGS}
    buckets = {f"d {bucket}" for bucket in kernel.BUCKETS}
    kinds = set(triton_compile.MASKS)
    assert parts == configs | buckets | kinds | set(kernel.SUPPORT.dtypes)
    assert set(kernel._SPILL_BUDGETS) <= set(names["sm_90a"])


def ptx_of(module: Any, kind: str, head_dim: int, config: Any) -> str:
    args = triton_compile.arguments(config, "float16", head_dim, kind)
    out = triton_compile.meta(tuple(args.q.shape), "float16")
    lse = triton_compile.meta(tuple(args.q.shape[:3]), "float32")
    return str(triton_compile.compiled(module.launch(args, out, lse), "sm_90a").asm["ptx"])


def opcodes(text: str) -> dict[str, int]:
    """How often a PTX text waits at, opens and closes barriers, and copies, multiplies, fences."""
    words = {
        "wait": r"mbarrier\.try_wait\.parity",
        "init": r"mbarrier\.init",
        "inval": r"mbarrier\.inval",
        "expect": r"mbarrier\.arrive\.expect_tx",
        "copy": r"cp\.async\.bulk\.tensor\.4d",
        "wgmma": r"wgmma\.mma_async",
        "fence": r"fence\.proxy\.async",
    }
    return {name: len(re.findall(word, text)) for name, word in words.items()}


@pytest.fixture(scope="module")
def shipped() -> str:
    return ptx_of(kernel, "causal", 64, TALL)


@pytest.mark.for_ci
def test_the_ptx_has_the_barriers_of_the_ring(shipped: str) -> None:
    """A barrier for Q and two per slot. A wait for Q, and for K and V, in the loop and outside. A
    copy for each slot at the start, for the first slot of K after the first S, and in the loop."""
    slots = 2
    counts = opcodes(shipped)
    assert ".target sm_90a" in shipped
    assert counts["init"] == counts["inval"] == 2 * slots + 1
    assert counts["wait"] == 1 + 2 * 2
    assert counts["expect"] == counts["copy"] == 1 + 2 * slots + 3
    assert counts["fence"] == 3  # the barriers, and hidden values: in the loop and of the last
    assert counts["wgmma"] == 2 * (64 // 16 + 128 // 16)  # twice: S over dims, O over keys


def build_named(name: str) -> Build:
    (build,) = (build for build in kernel.builds("sm_90a") if build.name == name)
    return build


@pytest.mark.for_ci
@pytest.mark.parametrize(
    "name", ["m128n128w8s2, float16, d 256, causal", "m64n64w4s3, float16, d 64, causal"]
)
def test_a_build_keeps_its_budgets_and_has_hoppers_instructions(name: str) -> None:
    build = build_named(name)
    made = build.compile()
    assert made.resources.shared <= SHARED_BYTES
    text = listing(made.cubin)
    counts = {word: len(re.findall(rf" {word}[ .]", text)) for word in ("HGMMA", "UTMALDG")}
    assert not list(build.broken(made.resources, counts))
    assert (made.resources.spill_stores > 0) == (build.spill_budget > 0)
    assert min(counts.values()) > 0
    assert " SYNCS.PHASECHK" in text
    assert "WARPGROUP.DEPBAR" in text


# Planted copies.


@pytest.mark.parametrize("slip", tier.for_ci(gluon_forward.SLIPS))
def test_a_planted_copy_compiles_and_differs_by_its_slip(slip: str, shipped: str) -> None:
    copy = gluon_forward.COPIES.copy_of(slip)
    assert copy.fetch.__module__ == copy.__name__.replace("hopper_forward", "ring")
    planted = ptx_of(copy, "causal", 64, gluon_forward.COPIES.config)
    before, after = opcodes(shipped), opcodes(planted)
    assert before["wait"] - after.pop("wait") == (1 if slip == "missing-wait" else 0)
    assert after == {name: count for name, count in before.items() if name != "wait"}
    assert re.sub(r"//.*|\.loc.*", "", planted) != re.sub(r"//.*|\.loc.*", "", shipped)


def test_planted_copies_are_variants_of_their_own() -> None:
    names = [variant.name for variant in gluon_forward.VARIANTS]
    assert names == [f"planted-gluon-{slip}" for slip in gluon_forward.SLIPS]
    for variant in gluon_forward.VARIANTS:
        assert variant.family == "planted"
        assert variant.numerics == kernel.VARIANT.numerics
        assert variant.contract == kernel.VARIANT.contract
        assert variant.support.max_capability == (9, 0)
        args = arguments(replace(PLAIN, head_dim=64))
        with pytest.raises(Unsupported, match="head_dim"):
            variant.forward(args, torch.empty_like(args.q), None, {})
