"""Counting and gather where sums of ones, and of one key, round nothing: what is left of their
bounds.

`python3 -m tests.exact_sums_sweep` judges as many elements as it is asked for.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from references.masks import Causal
from tests import exact_sums_sweep
from tests.exact_sums_sweep import arithmetics, sharper, trials
from tests.harness.declared import flat_numerics
from tests.harness.emulation import Kernel
from tests.harness.fake_trials import DECLARED, PLAIN, acquitted, convicted, tried
from verify.arithmetic.instructions import EXP
from verify.oracles import counting, gather
from verify.problem import Problem
from verify.tolerance.arithmetic import U
from verify.tolerance.exact_sums import ExactUnit, of_ones
from verify.tolerance.resolution import resolve
from verify.variant import Config, Numerics

COUNTED = PLAIN.but(distribution="counting", mask=Causal(), seqlen_kv=70, seqlen_q=40)
GATHERED = PLAIN.but(distribution="gather", mask=Causal())
ORDERED = flat_numerics(key_order="ascending", division="div.rn", block_n=32)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.first_look(1)
@pytest.mark.parametrize("oracle", ["counting", "gather"])
def test_honest_kernels_pass(oracle: str) -> None:
    """Of every emulated arithmetic the first two problems; the sweep judges more."""
    judge = {"counting": counting.judge, "gather": gather.judge}[oracle]
    for kernel in arithmetics():
        declared = replace(DECLARED, numerics=kernel.numerics)
        if oracle == "gather" and gather.excludes(declared) is not None:
            continue
        for dtype in kernel.dtypes:
            for trial in itertools.islice(trials(kernel, dtype, oracle), 2):
                finding = judge(trial).finding
                assert finding is None, f"{kernel.name}, {trial.problem.name}: {finding}"
                assert all(ratio > 0.999 for ratio in sharper(trial, oracle).values())


@pytest.mark.parametrize("length", [1, 5, 8, 16, 31, 64, 100])
def test_functions_of_cpus_are_1_at_0(length: int) -> None:
    """In whole vectors and in their rests; torch's and numpy's stand for `vexp`, `exp_u20` and for
    what Triton's interpreter calls."""
    for zero in (0.0, -0.0):
        zeros = torch.full((length,), zero)
        array = zeros.numpy()
        for made in (torch.exp(zeros), torch.exp2(zeros)):
            assert bool((made == 1).all())
        for made in (np.exp(array), np.exp2(array)):
            assert bool((made == 1).all())
    query = torch.zeros(1, 1, 3, 16)
    keys = torch.randn(1, 1, length, 16, generator=torch.Generator().manual_seed(length))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse, *_ = flash(query, keys, torch.ones(1, 1, length, 16))
    assert bool((out == 1).all())
    assert float((lse.double() - math.log(length)).abs().max()) <= 2 * U * math.log(length)


def test_functions_that_are_not_known_to_be_1_at_0_are_not_taken_to_be() -> None:
    unknown = {name for name, function in EXP.items() if not function.one_at_zero}
    assert unknown == {"fexp_u20", "__expf", "ex2.approx.f16", "ex2.approx.ftz.bf16"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_stored_number_counts_mostly(dtype: str) -> None:
    """Where the order of keys is declared, the neighbour of O is wrong."""
    case = COUNTED.but(dtype=dtype)
    right = tried(case, numerics=ORDERED)
    assert acquitted(counting.judge(right))
    for step in (-1, 1):

        def beside(out: Tensor, lse: Tensor, step: int = step) -> None:
            bits = out.view(torch.int32 if dtype == "float32" else torch.int16)
            bits[1, 2, 30, 3] += 2 * step if dtype == "float32" else step

        finding = convicted(counting.judge(tried(case, beside, numerics=ORDERED)), "1 of")
        assert finding.where == "out[b=1, h=2, q=30, d=3]"


@pytest.mark.parametrize(
    ("fault", "strength"),
    [("scale of O", 2.0**-21), ("lse", 2.0**-18)],
)
def test_small_faults_that_the_bound_allows_are_convicted(fault: str, strength: float) -> None:
    """In fp32, on every architecture: sums of 70 ones have no error."""

    def plant(out: Tensor, lse: Tensor) -> None:
        if fault == "lse":
            lse.add_(strength)
        else:
            out.mul_(1 + strength)

    numerics = flat_numerics(block_n=32)
    honest, trial = tried(COUNTED, numerics=numerics), tried(COUNTED, plant, numerics=numerics)
    truth = trial.truth
    live = ~truth.empty & (truth.lse > math.log(60))
    name, bound = ("lse", truth.lse_bound) if fault == "lse" else ("out", truth.out_bound)
    error = (trial.first.outputs[name].double() - getattr(truth, name)).abs()
    assert bool((error <= bound)[live].all())
    for arch in ("cpu", "sm_80", "sm_90"):
        honest.arch = trial.arch = arch
        assert acquitted(counting.judge(honest))
        convicted(counting.judge(trial), "miscount" if fault != "lse" else "lse counts")


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": "__expf"},
        {"exp": "ex2.approx", "rescale_exp": "fexp_u20"},
        {"maximum_excess": 1.0},
        {"probability": "float8_e4m3fn", "probability_scale": 256.0},
    ],
    ids=" ".join,
)
def test_weights_that_are_not_known_to_be_1_keep_the_bound(changes: dict[str, object]) -> None:
    eight = "probability" in changes
    problem = COUNTED.but(dtype="float8_e4m3fn", dtype_out="bfloat16") if eight else COUNTED
    a = resolve(flat_numerics(**changes), Config(), problem, "cpu")
    assert of_ones(a, 70, "cpu") is None
    if not eight:  # whose P can be rounded to 1 alone
        trial = tried(problem, numerics=flat_numerics(**changes))
        want, logs = trial.truth.out, trial.truth.lse
        assert torch.equal(counting._bounds(trial, want, logs)[2], trial.truth.lse_bound)


def test_a_plain_function_has_the_forwards_bounds() -> None:
    trial = tried(COUNTED, undeclared=True)
    _, out, lse = counting._bounds(trial, trial.truth.out, trial.truth.lse)
    assert torch.equal(out, trial.truth.out_bound)
    assert torch.equal(lse, trial.truth.lse_bound)


def test_a_unit_adds_so_many_ones_and_no_more() -> None:
    def exact(keys: int, arch: str, dtype: str, numerics: Numerics) -> bool:
        text = f"sq=1,skv={keys},d=16,dtype={dtype},dist=counting"
        problem = Problem.parse(f"{text},out=bfloat16" if "8" in dtype else text)
        made = of_ones(resolve(numerics, Config(), problem, arch), keys, arch)
        return made is not None and isinstance(made.values, ExactUnit)

    narrow = flat_numerics(accumulator="float16")
    assert exact(2047, "sm_90", "float16", narrow)
    assert not exact(2048, "sm_90", "float16", narrow)
    eight = flat_numerics(instruction="wgmma")
    assert exact(8191, "sm_90", "float8_e4m3fn", eight)
    assert not exact(8192, "sm_90", "float8_e4m3fn", eight)
    assert exact(2**20, "sm_90", "float16", Numerics())


def test_more_ones_than_fp16_holds_keep_their_error() -> None:
    """An fp16 accumulator that adds 2100 ones to 2048 at a time stops there, honestly."""
    kernel = Kernel("fp16", flat_numerics(block_n=32, accumulator="float16"), dtypes=("float16",))
    a = resolve(
        kernel.numerics, Config(), Problem.parse("sq=1,skv=2100,d=16,dtype=float16"), "sm_90"
    )
    made = of_ones(a, 2100, "sm_90")
    assert made is not None
    assert made.values == a.values


def test_a_gathered_row_in_fp32_is_that_row_to_the_last_bits() -> None:
    """2^-9 of it was within the bits that are compared, and is now far beyond."""
    case = GATHERED.but(seqlen_kv=300)

    def larger(out: Tensor, lse: Tensor) -> None:
        out[0, 1, 3, 2] *= 1 + 2.0**-18

    finding = convicted(gather.judge(tried(case, larger)), "no other key has any weight")
    assert finding.where == "out[b=0, h=1, q=3, d=2]"
    assert acquitted(gather.judge(tried(case)))


def test_the_sweep_refuses_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--elements", "500", "--only", "online, exp2f"]
    assert exact_sums_sweep.main(words) == 0
    assert "0 cases refused" in capsys.readouterr().out
    wrong = next(one for one in arithmetics() if one.name == "online, exp2f")
    wrong = wrong.but(fault="drops the last key", dtypes=("float16",))
    monkeypatch.setattr(exact_sums_sweep, "arithmetics", lambda: (wrong,))
    assert exact_sums_sweep.main(words) == 1
    assert "REFUSED" in capsys.readouterr().out
