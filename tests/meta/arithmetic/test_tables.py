"""The tables of arithmetic on trial: nothing moved by accident, nothing without a source, guesses
that say so."""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
from importlib import util
from pathlib import Path

import numpy as np
import pytest
import torch

from verify.arithmetic.archs import arch_named, archs
from verify.arithmetic.dtypes import DTYPES
from verify.arithmetic.instructions import (
    DIVISION,
    EXP,
    EXP_ERROR,
    LOG,
    LOG_ERROR,
    TANH,
    TANH_ERROR,
    ULP,
    exp_error,
    tanh_error,
)
from verify.arithmetic.mma import accumulated, provenance, unit_for
from verify.arithmetic.unit import AnyOf
from verify.arithmetic.units import UNITS

NVIDIA = (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
LENGTHS = (1, 3, 16, 64, 1000, 100_000)


def truncating(products: int, fraction: int, output: int, operand: float = 0.0):
    return lambda n: n * 2.0**-fraction + math.ceil(n / products) * 2.0**-output + 2 * operand


def nearest(precision: int):
    return lambda n: math.expm1(n * math.log1p(2.0**-precision))


# Written out once more, so that an edited entry shows.
BOUNDS = {
    ("sm_70", "float16"): truncating(4, 23, 23),
    ("sm_75", "float16"): truncating(4, 24, 23),
    ("sm_80", "float16"): truncating(8, 24, 23),
    ("sm_86", "bfloat16"): truncating(8, 24, 23),
    ("sm_80", "tf32"): truncating(4, 24, 23, 2.0**-10),
    ("sm_80", "tf32x3"): truncating(1, 22, 23, 1.5 * 2.0**-20),
    ("sm_89", "bfloat16"): truncating(8, 24, 23),
    ("sm_89", "float8_e4m3fn"): truncating(16, 13, 13),
    ("sm_90", "float16"): truncating(16, 25, 23),
    ("sm_90", "tf32"): truncating(8, 25, 23, 2.0**-10),
    ("sm_90", "tf32x3"): truncating(2, 23, 23, 1.5 * 2.0**-20),
    ("sm_90", "float8_e5m2"): truncating(32, 13, 13),
    ("sm_103", "bfloat16"): truncating(16, 25, 23),
    ("sm_103", "float8_e4m3fn"): truncating(8, 25, 23),
    ("sm_120", "float8_e4m3fn"): truncating(32, 25, 23),
    ("sm_120", "tf32x3"): truncating(2, 23, 23, 1.5 * 2.0**-20),
    ("cpu", "float16"): nearest(24),
    ("cpu", "bfloat16"): nearest(24),
    ("cpu", "float8_e5m2"): nearest(24),
    ("interpreter", "bfloat16"): nearest(24),
    ("cpu", "float32"): nearest(24),
    ("sm_90", "float64"): nearest(53),
    ("sm_999", "float16"): truncating(4, 23, 23),
    ("sm_999", "bfloat16"): truncating(8, 24, 23),
    ("sm_80", "float8_e4m3fn"): truncating(16, 13, 13),
    ("sm_75", "tf32"): truncating(4, 24, 23, 2.0**-10),
}


@pytest.mark.parametrize(("arch", "operands"), list(BOUNDS))
def test_bounds_are_those_of_the_documents(arch: str, operands: str):
    for n in LENGTHS:
        assert unit_for(arch, operands).kappa(n) == BOUNDS[arch, operands](n)


def test_what_subnormals_cost_by_flushing():
    assert unit_for("cpu", "bfloat16").flush == 2.0**-126
    assert unit_for("sm_90", "tf32").flush == unit_for("sm_80", "tf32x3").flush == 2.0**-136
    assert unit_for("interpreter", "bfloat16").flush == unit_for("sm_90", "float16").flush == 0


def test_every_architecture_is_there_and_says_where_from():
    for arch in (*(f"sm_{number}" for number in NVIDIA), "cpu", "interpreter"):
        assert provenance(arch, "float16").kind == (
            "borrowed" if arch_named(arch).borrows else "table"
        )
    for (operands, accumulator), rows in UNITS.items():
        for arch, row in rows.items():
            assert "" in row, (arch, operands, accumulator)
            for unit in row.values():
                assert unit.source, (arch, operands)
                assert unit.accumulator == accumulator
    for function in (*EXP.values(), *TANH.values(), *LOG.values(), *DIVISION.values()):
        assert function.source
        assert function.error > 0 or function.absolute > 0


def test_a_guess_says_so_and_from_what():
    unknown = provenance("sm_999", "float16")
    assert unknown.guess
    assert (
        unknown.sentence == "the tables do not know sm_999: the most pessimistic, sm_70's, is taken"
    )
    lacking = provenance("sm_80", "float8_e4m3fn")
    assert lacking.guess
    assert "no unit of sm_80 for float8_e4m3fn" in lacking.sentence
    assert "sm_89's" in lacking.sentence
    borrowed = provenance("sm_88", "bfloat16")
    assert not borrowed.guess
    assert "as on sm_80" in borrowed.sentence
    assert not provenance("sm_90", "float16", "float16").guess
    assert "25 fraction bits" in provenance("sm_90", "float16").sentence
    assert not provenance("sm_999", "float32").guess
    for operands, accumulator in (
        ("int4", "float32"),
        ("bfloat16", "float16"),
        ("tf32", "float16"),
    ):
        with pytest.raises(ValueError, match=operands):
            provenance("sm_90", operands, accumulator)
    with pytest.raises(ValueError, match=r"only mma\.sync, wgmma"):
        unit_for("sm_90", "float16", instruction="tcgen05")


def test_a_guess_is_the_most_pessimistic():
    for operands, accumulator in UNITS:
        guess = unit_for("sm_999", operands, accumulator)
        for arch, n in itertools.product([a.name for a in archs()], LENGTHS[:-1]):
            # An fp16 chain on a CPU says nothing of a GPU.
            if arch.startswith("sm_") or accumulator == "float32":
                assert guess.kappa(n) >= unit_for(arch, operands, accumulator).kappa(n), (
                    arch,
                    operands,
                    accumulator,
                    n,
                )


def test_what_says_nothing_of_its_instruction_bounds_each_of_them():
    """The default of an architecture against every instruction that it has: one of it, few or all
    products used, and many."""
    used = torch.tensor([1.0, 2.0, 3.0, 8.0, 17.0, 32.0], dtype=torch.float64)
    for (operands, accumulator), rows in UNITS.items():
        for arch, row in rows.items():
            for name, unit in row.items():
                if isinstance(unit, AnyOf):  # of others in the row
                    assert set(unit.units) < set(row.values())
                    continue
                depth = getattr(unit, "every", 32)
                few = used.clamp(max=depth)
                assert bool((row[""].kappas(few, depth) >= unit.kappas(few, depth)).all()), (
                    arch,
                    operands,
                    accumulator,
                    name,
                )
                for n in (32, 64, 1024):
                    assert row[""].kappa(n) >= unit.kappa(n), (arch, operands, accumulator, name, n)


def test_promotion_of_an_fp16_accumulator_begins_anew():
    unit = unit_for("sm_80", "float16", "float16")
    promoted = accumulated(unit, 64, 128, 8)
    assert promoted.kappa(4096) < unit.kappa(4096) / 10
    assert promoted.kappa(64) == pytest.approx(unit.kappa(64), rel=1e-12)
    assert promoted.domain(4096) > unit.domain(4096)
    assert accumulated(unit, 0, 128, 8) == unit, (
        "fp16's bits are no more than F, however often it is rescaled"
    )
    chain = unit_for("cpu", "float16", "float16")
    assert accumulated(chain, 64, 128, 8) == chain


def test_exponentials_and_logarithms_as_they_were():
    old = {"ex2.approx": 2.5, "exp2f": 2.5, "expf": 2.5, "vexp": 2.5, "numpy": 4.5, "exp_u20": 20.5}
    assert {name: EXP_ERROR[name] for name in old} == {
        name: ulps * ULP for name, ulps in old.items()
    }
    assert exp_error("fexp_u20") == 1.13e-4
    assert TANH_ERROR == {"tanhf": 2.5 * ULP, "tanh.approx": 2.0**-11 + 0.5 * ULP}
    assert LOG_ERROR == 2.0**-22
    for name in ("__expf", "ex2.approx.f16", "ex2.approx.ftz.bf16", "exp"):
        with pytest.raises(ValueError, match=r"ex2\.approx"):
            exp_error(name)
    with pytest.raises(ValueError, match="tanhf"):
        tanh_error("tanh.approx.f16")
    assert EXP["ex2.approx"].error_at(100.0) == EXP_ERROR["ex2.approx"]
    assert EXP["__expf"].error_at(80.0) >= (2 + math.floor(1.173 * 80)) * ULP


def test_a_rounded_argument_costs_what_it_says():
    """exp2 of fp16 arguments, otherwise exact: never more than the entry, and about as much at its
    worst."""
    function = EXP["ex2.approx.f16"]
    x = torch.linspace(-14, 0, 20_001, dtype=torch.float64)
    rounded = torch.from_numpy(x.numpy().astype(np.float16)).double()
    error = (torch.exp2(rounded - x) - 1).abs()
    bound = torch.tensor([function.error_at(abs(float(v))) - function.error for v in x])
    assert bool((error <= bound + 1e-16).all())
    assert float((error / (bound + 1e-16)).max()) > 0.9


def test_the_cubic_exponential_errs_as_the_table_says():
    """Every fraction of 20 bits, in fp64 with each step rounded to fp32; 23 bits gave 8.769e-5."""
    coefficients = [
        float(np.float32(c))
        for c in (0.077119089663028717, 0.22756439447402954, 0.69514614343643188, 1.0)
    ]
    f = np.arange(1 << 20) / (1 << 20)
    value = np.full_like(f, coefficients[0])
    for c in coefficients[1:]:
        value = (value * f + c).astype(np.float32).astype(np.float64)
    worst = float(np.abs(value / np.exp2(f) - 1).max())
    assert 0.99 * EXP["exp2_poly3"].error <= worst + ULP / 2 <= EXP["exp2_poly3"].error


def test_formats_hold_what_their_definitions_say():
    for dtype in DTYPES.values():
        info = torch.finfo(dtype.torch)
        assert (info.max, info.tiny, info.bits) == (dtype.max, 2.0**dtype.emin, 8 * dtype.itemsize)
        assert info.eps == 2 * dtype.unit_roundoff


MMA = r"""extern "C" __global__ void one(unsigned *a, float *c) {
    unsigned *b = a + 128;
    a += threadIdx.x * 4; b += threadIdx.x * 2; c += threadIdx.x * 4;
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}"""


@pytest.mark.first_look(1)
@pytest.mark.parametrize(
    ("arch", "emulated"),
    [("sm_89", False), ("sm_90a", True), ("sm_100a", True), ("sm_120a", False)],
)
def test_which_architectures_emulate_fp8(arch: str, emulated: bool, tmp_path: Path):
    """What the table says of mma.sync in 8 bits, read from what the compiler makes of it."""
    disassembler = disassembler_of()
    core = pytest.importorskip("cuda.core")
    if disassembler is None:
        pytest.skip("no cuobjdump")
    binary = tmp_path / "one.cubin"
    binary.write_bytes(
        bytes(core.Program(MMA, "c++", core.ProgramOptions(arch=arch)).compile("cubin").code)
    )
    text = subprocess.run(
        [disassembler, "-sass", binary], capture_output=True, text=True, check=True
    ).stdout
    assert (
        text.count("QMMA.16832.F32.E4M3"),
        text.count("HMMA.16816.F32"),
        text.count("FADD "),
    ) == ((0, 2, 4) if emulated else (1, 0, 0))
    named = unit_for(arch.rstrip("a"), "float8_e4m3fn", instruction="mma.sync")
    assert (named.wiring.via == "float16") is emulated


def disassembler_of() -> str | None:
    spec = util.find_spec("triton")
    inside = (
        Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    )
    return str(inside) if inside and inside.exists() else shutil.which("cuobjdump")
