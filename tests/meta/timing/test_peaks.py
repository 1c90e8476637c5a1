"""The device's peaks: loops that compile for every architecture, and rates that are rates."""

from __future__ import annotations

import pytest

from tests.harness.fake_bench import record
from tests.properties import tier
from verify.arithmetic.archs import arch_named, archs
from verify.cuda import compile
from verify.timing import peaks
from verify.timing.peaks import LOOPS

compiles = pytest.mark.skipif(compile.compilable() is not None, reason=f"{compile.compilable()}")


@pytest.mark.first_look(3)
@compiles
@tier.first_tier("name", "arch")
@pytest.mark.parametrize("arch", [arch.target for arch in archs() if arch.compiled])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_compile_without_spills(name: str, arch: str) -> None:
    if "float8" in name and (arch_named(arch).capability or (0, 0)) < (8, 9):
        with pytest.raises(compile.CompileError, match="sm_89"):
            compile.compile_source(LOOPS[name].source, arch)
        return
    resources = compile.compile_source(LOOPS[name].source, arch).resources
    assert resources.spill_stores == resources.spill_loads == resources.stack == 0
    assert resources.registers <= 64, "a block of 1024 threads does not launch with more"


def test_rates_of_a_cpu_are_measured() -> None:
    listed = peaks.listed("cpu")
    assert [peak["name"] for peak in listed] == ["copy", "matmul float32"]
    assert {peak["value"] for peak in listed} == {None}
    assert peaks.measure("cpu", "matmul float32") > 0
    assert peaks.units("cpu") == {}


def test_a_gpu_has_every_peak_of_the_table() -> None:
    units = {peak["name"]: peak["unit"] for peak in peaks.listed("cuda")}
    assert units["copy"] == units["L2"] == units["shared memory"] == "GB/s"
    for dtype in ("float16", "bfloat16", "float8_e4m3fn"):
        assert units[f"matmul {dtype}"] == units[f"mma.sync {dtype}"] == "TFLOP/s"
    assert (units["fp32"], units["ex2"]) == ("TFLOP/s", "Tera/s")


def test_operations_of_the_loops() -> None:
    """Of a thread and round: 128 multiply-adds; 128 exponentials; 16 loads of 8 bytes; the share
    of a thread in 32 products of 16 x 8 x 16 (e4m3: 32) multiply-adds."""
    amounts = {name: loop.amount for name, loop in LOOPS.items()}
    assert amounts["fp32"] == 256
    assert amounts["ex2"] == 128
    assert amounts["shared memory"] == 128
    assert amounts["mma.sync float16"] == 32 * 2 * 16 * 8 * 16 / 32
    assert amounts["mma.sync float8_e4m3fn"] == 32 * 2 * 16 * 8 * 32 / 32


def test_the_matrix_peak_is_the_faster_of_both() -> None:
    found = record()["peaks"]
    loop = {**found[0], "name": "mma.sync float16", "value": 500.0}
    other = {**found[0], "name": "mma.sync bfloat16", "value": 510.0}
    unknown = {**found[0], "name": "matmul float32", "value": None}
    assert peaks.matrix_peaks([*found, loop, other, unknown]) == {  # type: ignore[list-item]
        "float16": 700.0,
        "bfloat16": 510.0,
    }
