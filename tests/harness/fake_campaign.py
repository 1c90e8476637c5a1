"""Fake evidence of a small, realistic campaign, for the tests of evidence and reports."""

import dataclasses
import math
import random

from verify.evidence import (
    Begin,
    Built,
    Drawn,
    Evidence,
    Finding,
    NotRun,
    RunInfo,
    VariantEntry,
    Verdict,
)
from verify.problem import Problem
from verify.report import Report

BINS = (
    "kv_tiles>=3",
    "ragged_tail",
    "seqlen_q!=seqlen_kv",
    "gqa",
    "empty_row",
    "rescale",
    "mask:full",
    "mask:causal",
)
DEVICE = {
    "slug": "nvidia-h100-80gb-hbm3",
    "kind": "cuda",
    "name": "NVIDIA H100 80GB HBM3",
    "capability": "9.0",
    "driver": "580.65",
    "cuda": "13.0",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "numpy": "2.3.0",
    "python": "3.12.3",
    "platform": "Linux x86_64",
    "cores": 16,
}
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float8_e4m3fn": 2.0**-4}
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")


def entry(ref: str, dtypes=("float16", "bfloat16"), **changes) -> VariantEntry:
    values = {
        "ref": ref,
        "name": ref,
        "family": ref.split("-", maxsplit=1)[0],
        "path": f"kernels/{ref.split('-', maxsplit=1)[0]}/{ref.replace('-', '_')}.py",
        "source_hash": f"{abs(hash_of(ref)):016x}",
        "configs": ("m128n64w4s3", "m64n64w4s2"),
        "support": {
            "dtypes": list(dtypes),
            "head_dims": list(range(16, 257)),
            "masks": ["full", "causal"],
            "score_mods": [],
        },
        "numerics": {
            "products": {"operands": "input", "accumulator": "float32"},
            "softmax": {"exp": "ex2.approx", "block_n": None},
            "output": {"probability": "input"},
        },
        "contract": {
            "lse": "natural",
            "empty_row_out": 0.0,
            "empty_row_lse": -math.inf,
            "deterministic": True,
        },
    }
    return VariantEntry(**(values | changes))


def hash_of(word: str) -> int:
    return random.Random(word).getrandbits(64)


def verdict(ref: str, dtype: str, index: int, **changes) -> Verdict:
    draw = random.Random(f"{ref} {dtype} {index}")
    oracle, group = [("forward", "bound"), ("counting", "exact"), ("gather", "exact")][index % 3]
    seqlen_kv = draw.choice([1, 17, 64, 129, 333, 512, 1024, 2048])
    problem = Problem(
        seqlen_q=draw.choice([1, 16, 65]), seqlen_kv=seqlen_kv, head_dim=64, dtype=dtype, seed=index
    ).name
    problem = changes.get("problem", problem)
    measures = {"seqlen_kv": float(seqlen_kv)}
    if oracle == "forward":
        r = min(0.9, draw.lognormvariate(-2.2, 0.7))
        bound = ROUNDOFF[dtype] * 4 * draw.lognormvariate(0, 0.5)
        measures |= of_tensor("out", r, bound, index) | {"r_lse": r / 9}
        measures |= {
            "bound_ratio": 1.3 if "tutorial" in ref else 1.0,
            "lse_ulp": draw.lognormvariate(0.5, 0.8),
        }
        measures |= ulps(0.2 * draw.lognormvariate(0, 0.3))
    elif oracle == "gather":
        measures |= {"r_out": 0.0, "max_error_out": 0.0}
    steps = {"generate": 1e-3, "run": 2e-3, "reference": 8e-3, "bound": 6e-3, "record": 1e-4}
    values = {
        "case": f"{ref}:m128n64w4s3:{oracle}:{problem}",
        "variant": ref,
        "config": "m128n64w4s3",
        "dtype": dtype,
        "oracle": oracle,
        "group": group,
        "outcome": "pass",
        "phase": "witness" if index < 2 else "generate",
        "problem": problem,
        "seconds": {step: seconds * draw.uniform(0.5, 3) for step, seconds in steps.items()},
        "measures": measures,
        "bins": (BINS[index % len(BINS)], BINS[(index + 3) % len(BINS)]),
        "time": 1.0 + index,
    }
    return Verdict(**(values | changes))


def of_tensor(tensor: str, r: float, bound: float, index: int) -> dict[str, float]:
    """An oracle's measures of one tensor: r, the largest error and the element with the worst r."""
    measures = {"r": r, "max_error": r * bound, "error_bound": bound}
    measures |= {"worst_index": float(index), "worst_reference": 0.25, "worst_bound": bound}
    return {f"{name}_{tensor}": value for name, value in measures.items()}


def ulps(median: float) -> dict[str, float]:
    """Errors of O in ulp, beside the best possible."""
    found = {"ulp50": median, "ulp99": 4 * median, "best50": 0.12, "best99": 0.49}
    return {f"{name}_out": value for name, value in found.items()}


def gradient_verdict(ref: str, dtype: str, index: int, **changes) -> Verdict:
    """dQ, dK and dV of one case, dK the worst."""
    made = verdict(ref, dtype, index, oracle="gradient_bound", group="gradients")
    draw = random.Random(f"gradients {ref} {dtype} {index}")
    measures = {"seqlen_kv": made.measures["seqlen_kv"]}
    for tensor, share in (("dq", 0.6), ("dk", 1.0), ("dv", 0.3)):
        r = share * min(0.9, draw.lognormvariate(-1.5, 0.6))
        measures |= of_tensor(
            tensor, r, ROUNDOFF[dtype] * 40 * share * draw.lognormvariate(0, 0.5), index
        )
    case = f"{ref}:m128n64w4s3:gradients:{made.problem}"
    return dataclasses.replace(made, **({"case": case, "measures": measures} | changes))


def built(
    ref: str,
    arch: str,
    build: str = "m128n64-float16-d64",
    *,
    spill: tuple[int, int] = (0, 0),
    **changes,
) -> Built:
    draw = random.Random(f"{ref} {arch} {build}")
    resources = {
        "registers": draw.choice([128, 168, 255]),
        "shared": draw.choice([49152, 101376]),
        "stack": 0,
    }
    resources |= {"spill_stores": spill[0], "spill_loads": spill[1]}
    values = {"variant": ref, "arch": arch, "build": build, "seconds": 1.5, "resources": resources}
    values |= {"spill_budget": sum(spill)}
    return Built(**(values | changes))


def builds() -> tuple[Built, ...]:
    """Builds: two per architecture of a variant that spills in one of them, one that fails, some
    left out, one for an absent device."""
    names = ("m128n64-float16-d64", "m128n64-float16-d256")
    records = [built("triton-fwd", arch, name) for arch in ARCHES for name in names]
    records[7] = built("triton-fwd", "sm_90a", names[1], spill=(96, 128))
    records += [
        built("triton-backward", "sm_90a", name, spill=(8, 8 + 8 * i))
        for i, name in enumerate(names)
    ]
    error = "CompilationError: 14:7 mma is not defined\nptxas exit code 255"
    records += [built("triton-tutorial", "sm_80"), built("triton-tutorial", "sm_100a")]
    records += [built("triton-tutorial", "sm_100a", names[1], resources=None, error=error)]
    records += [
        built("ptx-mma", "sm_80"),
        built("ptx-mma", "sm_80", names[1], resources=None, seconds=0.0),
    ]
    records += [built("gluon-hopper", "sm_90a")]
    return tuple(sorted(records, key=lambda b: (b.variant, b.arch, b.build)))


def failing(ref: str, dtype: str, index: int, problem: Problem, **changes) -> Verdict:
    finding = Finding(
        oracle="forward",
        message=(
            "O differs from the reference by 7.1 times the bound\nlargest at [0, 1, 14, 3], where a"
            " row has two keys"
        ),
        got=0.0312,
        bound=0.0044,
        where="[0, 1, 14, 3]",
        count=12,
        total=1040,
    )
    values = {
        "case": f"{ref}:m64n64w4s2:forward:{problem.name}",
        "config": "m64n64w4s2",
        "oracle": "forward",
        "group": "bound",
        "outcome": "fail",
        "problem": problem.name,
        "measures": {
            "seqlen_kv": float(problem.seqlen_kv),
            "r_out": 7.1,
            "r_lse": math.nan,
            "max_error_out": 0.0312,
            "error_bound_out": 0.0044,
        },
        "finding": finding,
    }
    return verdict(ref, dtype, index, **(values | changes))


def evidence(cases: int = 60, *, worse: float = 1.0) -> Evidence:
    """Three variants that ran (one of them fails), a backward, one of 8-bit inputs, one incomplete,
    one unavailable, builds, and a lost case."""
    entries = [
        entry("torch-flash"),
        entry("triton-fwd"),
        entry("triton-tutorial"),
        entry("ptx-mma", ("float16",)),
        entry("gluon-hopper", unavailable="needs compute capability 9.0"),
        entry(
            "triton-backward",
            ("float16", "float32"),
            entries=("backward",),
            gradients={"softmax": {"probability": "input"}},
        ),
        entry("triton-fp8-forward", ("float8_e4m3fn",)),
    ]
    verdicts = [
        verdict(e.ref, d, i)
        for e in entries[:3]
        for d in ("float16", "bfloat16")
        for i in range(cases)
    ]
    verdicts += [verdict("ptx-mma", "float16", i, bins=BINS[:2]) for i in range(4)]
    verdicts += [
        gradient_verdict("triton-backward", d, i)
        for d in ("float16", "float32")
        for i in range(cases)
    ]
    verdicts += [verdict("triton-fp8-forward", "float8_e4m3fn", i) for i in range(cases)]
    if worse != 1:
        grown = ("r_out", "r_dk")
        verdicts = [
            dataclasses.replace(
                v,
                measures=v.measures | {k: v.measures[k] * worse for k in grown if k in v.measures},
            )
            for v in verdicts
        ]
    large = Problem(seqlen_q=65, seqlen_kv=333, head_dim=64, dtype="bfloat16", seed=1)
    small = Problem(seqlen_q=15, seqlen_kv=2, head_dim=16, dtype="bfloat16", seed=1)
    verdicts += [
        failing("triton-tutorial", "bfloat16", 900, large),
        failing("triton-tutorial", "bfloat16", 901, small, phase="shrink"),
    ]
    drawn = [
        Drawn(variant=e.ref, dtype=d, group="bound", drawn=340, refused=12)
        for e in entries[:3]
        for d in ("float16", "bfloat16")
    ]
    return Evidence(
        runs=(
            RunInfo(
                run="20250101T000000Z-abc123",
                started="2025-01-01T00:00:00+00:00",
                profile="ci",
                device=DEVICE,
                versions={"attention-verify": "0.1.0"},
            ),
        ),
        variants=tuple(sorted(entries, key=lambda e: e.ref)),
        verdicts=tuple(sorted(verdicts, key=lambda v: (v.case, v.oracle))),
        lost=(
            Begin(
                case="ptx-mma:default:forward:sq=3,skv=5,d=16,dtype=float16",
                phase="generate",
                time=1.0,
                variant="ptx-mma",
            ),
        ),
        drawn=tuple(sorted(drawn, key=lambda d: (d.variant, d.dtype))),
        builds=builds(),
        not_run=(NotRun(variant="cute-fa3", reason="nvidia-cutlass is not installed"),),
    )


def of(report: Report, ref: str):
    return next(v for v in report["variants"] if v["ref"] == ref)
