"""A kernel whose fp32 products may be tf32 is judged so on a CPU too: Triton's interpreter drops
tf32's bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.declared import flat_numerics
from tests.harness.emulation import Kernel, Luck, emulate
from tests.harness.property_cases import bench
from tests.meta.tolerance.test_tolerance import ratios, truth_of
from verify.arithmetic.mma import provenance, unit_for
from verify.problem import Problem
from verify.tolerance.resolution import product_unit

pytestmark = pytest.mark.usefixtures("one_thread")
CASE = Problem(
    batch=1, heads_q=2, heads_kv=2, seqlen_q=20, seqlen_kv=30, head_dim=32, dtype="float32", seed=1
)


def test_a_right_kernel_passes_in_the_interpreter_and_one_that_declares_ieee_does_not(
    tmp_path: Path,
) -> None:
    with bench("tf32_products.py", tmp_path) as judge:
        for problem in (CASE, CASE.but(distribution="v_mean", seed=4)):
            right = judge.verdict("tf32", "accuracy", "bound", problem)
            assert right.outcome == "pass"
            assert right.measures["r_out"] < 1
            assert judge.verdict("ieee", "accuracy", "bound", problem).outcome == "fail"


def test_the_bound_of_tf32_holds_what_a_serial_chain_of_cut_operands_does() -> None:
    cut = Kernel(
        "tf32",
        flat_numerics(float32_products="tf32", exp="exp2f", block_n=32),
        arch="cpu",
        dtypes=("float32",),
    )
    for distribution in ("normal", "v_mean", "same_sign_v", "outliers", "subnormals"):
        problem = CASE.but(distribution=distribution)
        found = emulate(problem, cut, Luck.AGAINST)
        assert ratios(problem, found, truth_of(problem, cut.numerics, "cpu")).worst <= 1
    ieee = truth_of(CASE, flat_numerics(exp="exp2f", block_n=32), "cpu")
    assert ratios(CASE, emulate(CASE, cut), ieee).worst > 1


def test_what_the_declaration_says_decides_on_a_cpu() -> None:
    fp32 = unit_for("cpu", "float32")
    assert product_unit("cpu", "float32", "ieee") == fp32
    assert product_unit("cpu", "float32", "tf32x3") == fp32
    assert (
        product_unit("cpu", "float32", "tf32").operand_error
        == unit_for("sm_90", "tf32").operand_error
    )
    assert product_unit("cpu", "bfloat16", "tf32") == unit_for("cpu", "bfloat16")
    assert not provenance("cpu", "tf32").guess
