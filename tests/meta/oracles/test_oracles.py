"""Each oracle alone: a right result, made from the fp64 reference, passes; one planted fault is
convicted and located."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Window
from tests.harness.fake_trials import (
    DECLARED,
    EMPTY,
    PLAIN,
    acquitted,
    convicted,
    right_run,
    trial_of,
    tried,
)
from tests.harness.laid import fill
from verify.arithmetic.dtypes import dtype_named
from verify.cell.arena import Damage
from verify.cell.process import Reply
from verify.judging.comparison import compare
from verify.judging.findings import Ruling
from verify.judging.launch import Launch
from verify.judging.run_checks import execution, memory
from verify.judging.trial import Trial
from verify.oracles import (
    bound,
    counting,
    empty_rows,
    gather,
    repeat,
)
from verify.variant import Contract

torch.set_num_threads(1)

RIGHT = {
    "bound": (bound.FORWARD, PLAIN),
    "bound, empty rows": (bound.FORWARD, EMPTY),
    "bound, half": (bound.FORWARD, PLAIN.but(dtype="float16", mask=Causal())),
    "counting": (counting.ORACLE, PLAIN.but(distribution="counting", mask=Window(2, 1))),
    "counting, half": (counting.ORACLE, EMPTY.but(distribution="counting", dtype="float16")),
    "gather": (gather.FORWARD, PLAIN.but(distribution="gather", mask=Causal())),
    "gather, half": (gather.FORWARD, EMPTY.but(distribution="gather", dtype="float16")),
    "empty_rows": (empty_rows.ORACLE, EMPTY),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize(
    "contract", [Contract(), Contract(lse="base2"), Contract(lse=None)], ids=lambda c: str(c.lse)
)
def test_the_reference_itself_is_acquitted(name: str, contract: Contract) -> None:
    oracle, problem = RIGHT[name]
    trial = tried(problem, contract=contract)
    assert acquitted(oracle.judge(trial))
    assert acquitted(execution(trial, trial.first))
    assert acquitted(memory(trial, trial.first))


# Bound.


def off_by(bounds: float) -> Trial:
    """O off by so many bounds at one element."""
    trial = trial_of(PLAIN)
    run = right_run(trial)
    assert run.out is not None
    run.out[1, 2, 3, 4] = trial.truth.out[1, 2, 3, 4] + bounds * trial.truth.out_bound[1, 2, 3, 4]
    trial.launches["first"] = run
    return trial


def test_one_element_beyond_its_bound_is_convicted() -> None:
    trial = off_by(1.5)
    ruling = bound.judge(trial)
    finding = convicted(
        ruling, "out is off by", "out[b=1, h=2, q=3, d=4]", "1 of 768 elements are out of bounds"
    )
    assert (finding.where, finding.count, finding.total) == (
        "out[b=1, h=2, q=3, d=4]",
        1,
        2 * 4 * 6 * 16,
    )
    assert ruling.measures["r_out"] == pytest.approx(1.5, rel=0.02)
    assert finding.bound == pytest.approx(float(trial.truth.out_bound[1, 2, 3, 4]))


@pytest.mark.parametrize("sign", [1, -1])
def test_one_element_within_its_bound_passes(sign: int) -> None:
    ruling = bound.judge(off_by(0.9 * sign))
    assert acquitted(ruling)
    assert ruling.measures["r_out"] == pytest.approx(0.9, rel=0.02)
    assert ruling.measures["r_lse"] < 1


def test_the_worst_of_several_is_named_and_all_are_counted() -> None:
    def plant(out: Tensor, lse: Tensor) -> None:
        out[0, 0, 0, :3] += 1.0
        out[1, 3, 5, 15] += 1000.0

    finding = convicted(bound.judge(tried(PLAIN, plant)), "4 of 768")
    assert finding.where == "out[b=1, h=3, q=5, d=15]"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_out_of_place_are_convicted(value: float) -> None:
    ruling = bound.judge(tried(PLAIN, lambda out, lse: out[0, 1, 2].fill_(value)))
    finding = convicted(ruling, "r = inf", "16 of 768")
    assert finding.where == "out[b=0, h=1, q=2, d=0]"
    assert ruling.measures["r_out"] == math.inf
    finding = convicted(
        bound.judge(tried(PLAIN, lambda out, lse: lse[1, 3, 5].fill_(value))), "lse"
    )
    assert finding.where == "lse[b=1, h=3, q=5]"


def test_an_infinity_is_right_only_beyond_the_format() -> None:
    half = dtype_named("float16")
    #            got       truth     bound  accepted
    cases = [
        (math.inf, 65530.0, 1.0, True),
        # truth and bound together reach 65520, where rounding gives infinity
        (math.inf, 65510.0, 20.0, True),
        (math.inf, 65510.0, 5.0, False),
        (-math.inf, 65530.0, 1.0, False),
        (-math.inf, -65530.0, 1.0, True),
        (65504.0, 65530.0, 30.0, True),
        (math.nan, 65530.0, 1.0, False),
        (math.nan, 1.0, math.inf, True),  # outside the declared arithmetic anything goes
        (0.0, 0.0, 0.0, True),
        (1e-30, 0.0, 0.0, False),  # must be exact
    ]
    got, want, limit = (
        torch.tensor([case[i] for case in cases], dtype=torch.float64) for i in range(3)
    )
    compared = compare(got, want, limit, half)
    assert (compared.ratio <= 1).tolist() == [case[3] for case in cases]
    assert compared.worst == math.inf
    empty = torch.empty(0, dtype=torch.float64)
    assert compare(empty, empty, empty, half).worst == 0


def test_a_lse_is_judged_in_the_base_of_its_contract() -> None:
    natural, base2 = Contract(lse="natural"), Contract(lse="base2")
    assert acquitted(bound.judge(tried(PLAIN, contract=base2)))
    convicted(
        bound.judge(tried(PLAIN, lambda out, lse: lse.mul_(math.log(2)), contract=base2)),
        "lse is off by",
        "of 48",
    )
    convicted(
        bound.judge(tried(PLAIN, lambda out, lse: lse.div_(math.log(2)), contract=natural)),
        "lse is off by",
    )


def test_a_lse_just_beyond_its_bound_is_convicted() -> None:
    for bounds, guilty in ((3.0, True), (0.2, False)):
        trial = tried(PLAIN)
        lse = trial.first.lse
        assert lse is not None
        lse[0, 0, 0] = trial.truth.lse[0, 0, 0] + bounds * trial.truth.lse_bound[0, 0, 0]
        assert acquitted(bound.judge(trial)) is not guilty


def test_empty_rows_are_left_to_their_oracle() -> None:
    def plant(out: Tensor, lse: Tensor) -> None:
        out[1] = math.nan
        lse[1] = 7.0

    assert acquitted(bound.judge(tried(EMPTY, plant)))


def test_a_bound_is_compared_with_the_best_where_that_is_finite() -> None:
    """Scores that fp32 cannot hold have no finite bound: inf / inf would be the median of many."""
    overflowing = PLAIN.but(dtype="bfloat16", distribution="range_edges", seed=328)
    for problem, compared in ((PLAIN, True), (overflowing, False)):
        trial = trial_of(problem)
        trial.with_best = True
        best = trial.known_truth.best_out_bound
        trial.launches["first"] = right_run(trial)
        assert best is not None
        assert bool(best.isfinite().any()) is compared
        measures = bound.judge(trial).measures
        assert measures.get("bound_ratio", 1.0) >= 0.9, "a number, or nothing"
        assert ("bound_ratio" in measures) is compared


def test_a_wrong_scale_is_beyond_the_bounds() -> None:
    trial = trial_of(PLAIN)
    other = trial_of(PLAIN.but(softmax_scale=PLAIN.scale * 1.01))
    trial.launches["first"] = right_run(other)
    convicted(bound.judge(trial))


# Empty rows.


@pytest.mark.parametrize("value", [math.nan, 1e-30, -1.0])
def test_an_empty_row_is_exactly_what_was_promised(value: float) -> None:
    finding = convicted(
        empty_rows.judge(tried(EMPTY, lambda out, lse: out[1, 2, 3, 4].fill_(value))),
        "row without a visible key",
    )
    assert (finding.where, finding.count, finding.bound) == ("out[b=1, h=2, q=3, d=4]", 1, 0.0)
    finding = convicted(
        empty_rows.judge(tried(EMPTY, lambda out, lse: lse[1, 2, 3].fill_(value))),
        "the contract says -inf",
    )
    assert finding.where == "lse[b=1, h=2, q=3]"


def test_the_sign_of_zero_is_free_and_other_promises_hold() -> None:
    assert acquitted(empty_rows.judge(tried(EMPTY, lambda out, lse: out[1].fill_(-0.0))))
    promise = Contract(empty_row_out=math.nan, empty_row_lse=math.inf)
    assert acquitted(empty_rows.judge(tried(EMPTY, contract=promise)))
    convicted(
        empty_rows.judge(tried(EMPTY, lambda out, lse: out[1].zero_(), contract=promise)),
        "the contract says nan",
    )
    convicted(
        empty_rows.judge(tried(EMPTY, lambda out, lse: lse[1].neg_(), contract=promise)),
        "the contract says inf",
    )


def test_rows_that_see_something_are_not_its_business() -> None:
    assert not empty_rows.ORACLE.concerns(tried(PLAIN))
    assert empty_rows.ORACLE.concerns(tried(EMPTY))
    assert acquitted(empty_rows.judge(tried(EMPTY, lambda out, lse: out[0].fill_(9))))


# Repeat.


def repeated(plant: Callable[[Tensor, Tensor], None] | None = None) -> Trial:
    trial = tried(PLAIN)
    again = right_run(trial, poison="huge")
    if plant is not None:
        assert again.out is not None
        assert again.lse is not None
        plant(again.out, again.lse)
    trial.launches["again"] = again
    return trial


def test_the_same_bits_again() -> None:
    assert acquitted(repeat.judge(repeated()))

    def out_bit(out: Tensor, lse: Tensor) -> None:
        out.view(torch.int32)[1, 3, 2, 1] ^= 1

    def lse_bit(out: Tensor, lse: Tensor) -> None:
        lse.view(torch.int32)[0, 1, 2] ^= 1

    finding = convicted(repeat.judge(repeated(out_bit)), "out differs between two runs", "1 of 768")
    assert finding.where == "out[b=1, h=3, q=2, d=1]"
    assert convicted(repeat.judge(repeated(lse_bit)), "lse differs").where == "lse[b=0, h=1, q=2]"


def test_a_second_run_that_fails_is_convicted_for_that() -> None:
    trial = tried(PLAIN)
    trial.launches["again"] = Launch(Reply("crash", "killed by SIGSEGV"), "huge")
    convicted(repeat.judge(trial), "SIGSEGV")

    def forgets(out: Tensor, lse: Tensor) -> None:
        fill(out[0, 0, 0], "huge")

    convicted(repeat.judge(repeated(forgets)), "leaves 16 of 768 elements of out unwritten")


def test_a_right_result_that_is_the_poison_was_written() -> None:
    """65504, fp16's largest number, once made a right kernel guilty of leaving dK unwritten."""
    trial = tried(PLAIN.but(dtype="float16"))
    for run in (trial.first, right_run(trial, poison="huge")):
        assert run.out is not None
        run.out[1, 3, 2, 1] = 65504.0
        trial.launches[{"nan": "first", "huge": "again"}[run.poison]] = run
    assert acquitted(repeat.judge(trial))
    assert trial.first.out is not None
    trial.first.out[1, 3, 2, 1] = 65472.0
    convicted(
        repeat.judge(trial),
        "leaves 1 of 768 elements of out unwritten, the first out[b=1, h=3, q=2, d=1]",
    )


def test_a_kernel_that_promises_no_repetition_is_not_asked_for_it() -> None:
    free = replace(DECLARED, contract=Contract(deterministic=False))
    oracle = repeat.ORACLES[0]
    assert oracle.excludes(DECLARED) is None
    assert oracle.excludes(free) == "declared not deterministic"
    free = replace(DECLARED, contract=Contract(deterministic_backward=False))
    assert [oracle.excludes(free) for oracle in repeat.ORACLES] == [
        None,
        "declared not deterministic",
    ]


# Execution and memory.

REPLIES = [
    (
        Reply("raised", "ValueError: no", data={"traceback": "line 7"}),
        ("raises: ValueError: no", "line 7"),
        "raised",
    ),
    (Reply("crash", "killed by SIGSEGV"), ("crashes: killed by SIGSEGV",), "crash"),
    (Reply("hang", "no answer within 4 s; killed"), ("hangs: no answer within 4 s",), "hang"),
    (
        Reply("breach", "returned its input q"),
        ("breaks the interface: returned its input q",),
        "breach",
    ),
    (Reply("out of memory", "CUDA"), ("out of memory: CUDA",), "out of memory"),
    (
        Reply("unsupported", "not today", "mask"),
        ("refuses a problem inside its declared support: mask: not today",),
        "Unsupported",
    ),
]


@pytest.mark.parametrize(
    ("reply", "words", "got"), REPLIES, ids=lambda value: getattr(value, "status", "")
)
def test_a_run_without_a_result_is_convicted(
    reply: Reply, words: tuple[str, ...], got: str
) -> None:
    trial = trial_of(PLAIN)
    finding = convicted(execution(trial, Launch(reply, "nan")), *words)
    assert (finding.oracle, finding.got, finding.bound) == ("execution", got, "a result")


def test_memory_that_a_run_keeps_is_a_measure() -> None:
    trial = trial_of(PLAIN)
    few = Reply("ok", grown=(64 << 20) - 1, taken=(64 << 20) - 1)
    assert execution(trial, Launch(few, "nan")) == Ruling()
    much = Reply("ok", grown=64 << 20, kept=1, taken=64 << 20)
    assert execution(trial, Launch(much, "nan")).measures == {
        "memory_growth": 64 << 20,
        "device_memory_growth": 1,
        "device_memory_taken": 64 << 20,
    }


def test_damage_and_unwritten_elements_are_convicted() -> None:
    trial = tried(PLAIN)
    run = trial.first
    assert run.out is not None
    assert run.lse is not None
    harm = replace(run, damage=Damage("redzone", "3 bytes past the end of out", 5))
    assert (
        convicted(
            memory(trial, harm),
            "writes outside its outputs: 5 bytes changed, the first 3 bytes past",
        ).count
        == 5
    )
    harm = replace(
        run, damage=Damage("k", "+4 bytes from the start of k, inside its allocation", 1)
    )
    convicted(memory(trial, harm), "changes its input k")
    lse = run.lse.clone()
    fill(lse[1, 2, 4:], "nan")
    unwritten = replace(run, outputs={"out": run.out, "lse": lse})
    finding = convicted(
        memory(trial, unwritten),
        "leaves 2 of 48 elements of lse unwritten, the first lse[b=1, h=2, q=4]",
    )
    assert finding.count == 2
    other = replace(run, outputs={"out": run.out, "lse": lse}, poison="huge")
    assert acquitted(memory(trial, other)), "another poison's bits are a value like any other"
    fill(lse[1, 2, 4:], "huge")
    convicted(memory(trial, other), "leaves 2 of 48 elements of lse unwritten")
    fill(run.lse[1, 2, 5:], "huge")
    finding = convicted(
        memory(trial, other),
        "leaves 1 of 48 elements of lse unwritten, the first lse[b=1, h=2, q=4]",
    )
    assert finding.count == 1, "a finite poison that the first run wrote over NaN is a result"
    assert acquitted(memory(trial, replace(run, outputs={"out": torch.empty(2, 4, 0, 16)})))
