"""8-bit arithmetic on trial: its bounds against emulated kernels and planted faults, and what the
Triton kernel compiles to."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from references.quantisation import ByTensor
from tests.harness.declared import flat_numerics, with_fields
from tests.harness.emulation import Kernel, Luck, emulate
from tests.harness.interpreter_child import in_child
from tests.meta.tolerance.test_tolerance import SHAPES, ratios, suits, truth_of
from tests.meta.tolerance.test_tolerance_bound import bound_of
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.tolerance.forward import BEST, resolve
from verify.variant import Config

ROOT = Path(__file__).parents[3]
DTYPES = ("float8_e4m3fn", "float8_e5m2")
OURS = flat_numerics(
    scale_roundings=3, probability_scale=256.0, output_roundings=1, block_n=32, promotion=32
)
PROMOTED = Kernel("promoted, sm_90", OURS, dtypes=DTYPES)
SYNC = PROMOTED.but(
    name="mma.sync m16n8k32, sm_90", promotion=0, instruction="mma.sync", eight="mma.sync"
)
HONEST = (
    PROMOTED,
    PROMOTED.but(name="13 bits throughout, sm_90", promotion=0),
    PROMOTED.but(name="13 bits throughout, sm_89", promotion=0, arch="sm_89"),
    PROMOTED.but(name="25 bits, sm_100", arch="sm_100"),
    SYNC,
    SYNC.but(name="mma.sync m16n8k16, sm_90", eight="mma.sync.m16n8k16"),
    PROMOTED.but(name="a CPU", arch="cpu"),
    PROMOTED.but(name="P as it is", probability_scale=1.0),
    PROMOTED.but(name="as FlashAttention-3 writes it", style="fused", promotion=64, block_n=64),
    PROMOTED.but(name="P in e5m2", probability="float8_e5m2"),
    PROMOTED.but(name="P in bf16", probability="bfloat16"),
    PROMOTED.but(name="everything in fp32", probability="float32", block_n=0),
    PROMOTED.but(name="normalised P", style="eager", normalised=True, block_n=0, exp="vexp"),
    PROMOTED.but(name="operands that are not normalised", normalises=False),
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.first_look(3)
@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: kernel.name)
def test_honest_kernels_stay_within_the_bound(kernel: Kernel):
    """Every distribution, each with the next shape, dtype, luck, factors and output in turn."""
    shapes = itertools.cycle([shape for shape in SHAPES if suits(kernel, shape)])
    factors, outputs, lucks = (
        itertools.cycle(("head", "none", "tensor")),
        itertools.cycle(("bfloat16", "float16")),
        [*Luck],
    )
    for turn, (distribution, dtype) in enumerate(itertools.product(ordinary(), kernel.dtypes)):
        given = f"dtype={dtype},dist={distribution},descale={next(factors)},out={next(outputs)}"
        problem = Problem.parse(f"{next(shapes)},{given}")
        luck = lucks[turn // 2 % 2]
        found = ratios(
            problem, emulate(problem, kernel, luck), truth_of(problem, kernel.numerics, kernel.arch)
        )
        assert found.worst <= 1, (
            f"{kernel.name}, {luck.value}: r = {found.worst:.3g} for {problem.name}"
        )


def test_honest_kernels_use_much_of_the_bound():
    worst = 0.0
    for shape, luck, seed in itertools.product(SHAPES[:4], Luck, range(2)):
        problem = Problem.parse(
            f"{shape},dtype=float8_e4m3fn,dist=one_hot_v,descale=head,seed={seed}"
        )
        found = ratios(problem, emulate(problem, PROMOTED, luck), truth_of(problem, OURS, "sm_90"))
        worst = max(worst, float(found.out.max()))
    assert 0.3 <= worst <= 1


SQUARE = "sq=16,skv=96,d=64,dtype=float8_e4m3fn"
FUSED = PROMOTED.but(style="fused")
CPU = PROMOTED.but(arch="cpu")
# (kernel as it computes, what it declares, problem)
FAULTS: dict[str, tuple[Kernel, Kernel, str]] = {
    "P in e5m2, declared e4m3": (
        PROMOTED.but(probability="float8_e5m2"),
        PROMOTED,
        f"{SQUARE},dist=one_hot_v",
    ),
    "P without its scale": (
        PROMOTED.but(probability_scale=1.0),
        PROMOTED,
        "sq=16,skv=400,d=64,dtype=float8_e4m3fn,dist=one_hot_v,scale=0.5",
    ),
    "P scaled by 4096, which saturates": (
        PROMOTED.but(probability_scale=4096.0),
        PROMOTED,
        f"{SQUARE},dist=v_mean",
    ),
    "promotion claimed but absent": (
        PROMOTED.but(promotion=0),
        PROMOTED,
        "sq=1,skv=12000,d=16,dv=2,dtype=float8_e4m3fn,scale=0.0,dist=same_sign_v",
    ),
    "13 bits, declared sm_100": (
        PROMOTED.but(promotion=0),
        PROMOTED.but(arch="sm_100"),
        f"{SQUARE},dist=normal,scale=1.0",
    ),
    "13 bits by wgmma, declared mma.sync": (
        PROMOTED.but(promotion=0),
        SYNC,
        f"{SQUARE},dist=normal,scale=1.0",
    ),
    "descale of K forgotten": (
        PROMOTED.but(fault="descale of K forgotten"),
        PROMOTED,
        f"{SQUARE},descale=tensor,scale=0.5,seed=1",
    ),
    "descale of Q squared": (
        PROMOTED.but(fault="descale of Q squared"),
        PROMOTED,
        f"{SQUARE},descale=tensor,scale=0.5,seed=1",
    ),
    "descale of V of another head": (
        PROMOTED.but(fault="descale of V of another head"),
        PROMOTED,
        f"hq=2,hkv=2,{SQUARE},descale=head,dist=v_mean",
    ),
    "LSE keeps the scale of P": (FUSED.but(fault="LSE keeps the scale of P"), FUSED, SQUARE),
    "scale off by 1e-3": (CPU.but(fault="scale off by 1e-3"), CPU, f"{SQUARE},scale=1.0"),
    "causal off by one": (
        PROMOTED.but(fault="causal off by one"),
        PROMOTED,
        f"{SQUARE},mask=causal",
    ),
    "no rescale": (PROMOTED.but(fault="no rescale"), PROMOTED, f"{SQUARE},scale=1.0"),
    "V off by one row": (PROMOTED.but(fault="V off by one row"), PROMOTED, SQUARE),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_exceed_the_bound(name: str):
    faulty, declared, text = FAULTS[name]
    problem = Problem.parse(text)
    truth = truth_of(problem, declared.numerics, declared.arch)
    # The same problem computed as declared passes: it is the fault that is caught.
    assert ratios(problem, emulate(problem, declared, Luck.AGAINST), truth).worst <= 1
    assert ratios(problem, emulate(problem, faulty, Luck.NEAREST), truth).worst > 1


def problem_of(**changes: object) -> Problem:
    return Problem(seqlen_q=4, seqlen_kv=100, head_dim=64, dtype="float8_e4m3fn").but(**changes)


def test_what_a_declaration_resolves_to():
    arithmetic = resolve(OURS, Config(), problem_of(), "sm_90")
    assert arithmetic.output.name == "bfloat16"
    assert arithmetic.probability_roundoff == 2.0**-4
    assert arithmetic.flush == 2.0**-18
    assert arithmetic.saturates == 1.75
    assert arithmetic.scores.kappa(256) < 1.01 * 33 * 2.0**-13, "promotion holds for Q K^T too"
    assert (
        resolve(with_fields(OURS, promotion=0), Config(), problem_of(), "sm_90").scores.kappa(256)
        == 264 * 2.0**-13
    )
    wide = resolve(OURS, Config(), problem_of(dtype="bfloat16"), "sm_90")
    assert (wide.probability_scale, wide.saturates, wide.offset) == (1.0, 0.0, 0.0)
    assert (
        resolve(OURS, Config(), problem_of(dtype_out="float16"), "sm_90").output.name == "float16"
    )
    assert resolve(OURS, Config(), problem_of(quantisation=ByTensor()), "sm_90").largest_factor >= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": "input"}, "scores"),
        ({"prescale": "q"}, "prescale"),
        ({"probability_scale": 448.0}, "probability_scale"),
    ],
)
def test_what_is_not_derived_is_refused(changes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        resolve(with_fields(OURS, **changes), Config(), problem_of(), "sm_90")


def test_more_lenient_declarations_give_larger_bounds():
    """An unknown arch last: it is taken for the worst there is."""
    text = "sq=20,skv=256,d=64,scale=0.02,dist=same_sign_v,dtype=float8_e4m3fn"
    order = [
        bound_of(text, BEST, "sm_100"),
        bound_of(text, OURS, "sm_100"),
        bound_of(text, OURS, "sm_90"),
        bound_of(text, with_fields(OURS, promotion=64), "sm_90"),
        bound_of(text, with_fields(OURS, promotion=0), "sm_90"),
        bound_of(text, with_fields(OURS, promotion=0), "sm_89"),
        bound_of(text, with_fields(OURS, promotion=0), "sm_999"),
    ]
    for tight, loose in itertools.pairwise(order):
        assert bool((loose.out >= tight.out).all())
        assert bool((loose.lse >= tight.lse).all())


def test_the_output_overflows_where_its_own_format_does():
    """O near 1e5 is an infinity in float16 and a number in bfloat16, whatever the inputs'
    format."""
    text = "sq=2,skv=1,d=16,dtype=float8_e5m2,scale=0.0,dist=normal"
    problem = Problem.parse(text)
    truth = truth_of(problem, OURS, "sm_90")
    huge = replace(
        truth, out=truth.out.sign() * 1e5, out_bound=torch.full_like(truth.out_bound, 1.0)
    )
    result = emulate(problem, PROMOTED)
    infinite = replace(result, out=truth.out.sign() * torch.inf, lse=result.lse)
    assert float(ratios(problem.but(dtype_out="float16"), infinite, huge).out.max()) == 0
    assert float(ratios(problem.but(dtype_out="bfloat16"), infinite, huge).out.max()) == torch.inf


# What the kernel declares of its products, read off the PTX that Triton makes of it.

COMPILE = """
import json
import re
import sys
from dataclasses import replace

import torch

from kernels.triton.compile import arguments, compiled, meta
from kernels.triton.fp8_forward import VARIANT, launch
from verify.variant import Descales

UNIT = r"(?:wgmma.mma_async|mma.sync)[.\\w]*?(\\.f32[.\\w]*)"
found = {}
builds = ("sm_89", 128, True), ("sm_90a", 128, True), ("sm_90a", 72, False), ("sm_120a", 64, True)
for arch, head_dim, aligned in builds:
    args = arguments(VARIANT.configs[1], "float8_e4m3fn", head_dim, "causal", aligned=aligned)
    args = replace(args, descales=Descales(*(meta((2, 2), "float32") for _ in "qkv")))
    out = meta(tuple(args.q.shape), "bfloat16", aligned=aligned)
    lse = meta(tuple(args.q.shape[:3]), "float32")
    ptx = compiled(launch(args, out, lse, widen=arch == "sm_89"), arch).asm["ptx"]
    found[f"{arch} {head_dim}"] = {
        "units": sorted(set(re.findall(UNIT, ptx))),
        "onto": sorted(set(re.findall(r"wgmma.mma_async[^;]*, (\\S+), 1, 1(?:, 0)?;", ptx))),
        "wgmmas": len(re.findall("wgmma.mma_async", ptx)),
        "fused": len(re.findall(r"fma\\.\\w+\\.f32", ptx)),
        "casts": sorted(set(re.findall(r"cvt[.\\w]*\\.e4m3x2\\.\\w+", ptx))),
    }
print(json.dumps(found))
"""


@pytest.mark.for_ci
def test_ptx_multiplies_as_declared():
    """sm_90: every wgmma, 32 products, begins at zero (scale-d 0), so that sums are fp32's.  sm_89,
    and sm_90 where rows are unaligned: no 8-bit product at all.  Nowhere is a product fused with a
    sum, and casts saturate."""
    done = in_child("-c", COMPILE, interpret="0")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    hopper = found["sm_90a 128"]
    assert hopper["units"] == [".f32.e4m3.e4m3"]
    assert hopper["wgmmas"] == 2 * (4 + 1), (
        "inner and edge blocks: 128 / 32 for Q K^T, 32 / 32 for P V"
    )
    assert hopper["onto"] == ["0"]
    assert found["sm_90a 72"]["units"] == found["sm_89 128"]["units"] == [".f32.f16.f16.f32"]
    assert found["sm_120a 64"]["units"] == [".f32.e4m3.e4m3.f32"]
    for build in found.values():
        assert not build["fused"]
        assert all(
            "cvt.rn.satfinite.e4m3x2" in cast
            for cast in build["casts"]
            if not cast.startswith("cvt.rn.f16x2")
        )
