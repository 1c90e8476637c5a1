"""The oracle for plain functions that round no scores: no honest function is convicted, whatever it
rounds, and small faults are."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Full
from tests.harness.fake_trials import acquitted, convicted
from tests.harness.plain_arithmetic import (
    KEPT,
    LATER,
    ROUNDED,
    Function,
    eager,
    half_weights,
    lse_of,
    plain,
    rounding,
    upcast,
    wide_scores,
)
from verify.judging import kept_scores as judging
from verify.judging.findings import Ruling
from verify.judging.kept_scores import Telling, keeping
from verify.oracles import bound, kept_scores, repeat
from verify.problem import Problem
from verify.problem.distributions import ordinary
from verify.report import kept_scores as reported
from verify.variant import Numerics

torch.set_num_threads(1)

HALVES = ("float16", "bfloat16")
SHAPES = (
    {"seqlen_q": 24, "seqlen_kv": 40, "head_dim": 64},
    {"seqlen_q": 40, "seqlen_kv": 100, "head_dim": 32, "mask": Causal(), "softmax_scale": 0.2},
    {"seqlen_q": 1, "seqlen_kv": 70, "head_dim": 128},
)
SOME = ("normal", "outliers", "increasing", "one_hot_v", "low_rank", "subnormals")


def problems(dtype: str, names: tuple[str, ...], seeds: range) -> Iterator[Problem]:
    for seed in seeds:
        for at, name in enumerate(names):
            yield Problem(
                batch=1,
                heads_q=2,
                heads_kv=1,
                dtype=dtype,
                distribution=name,
                seed=seed,
                **SHAPES[(at + seed) % len(SHAPES)],
            )


def rulings(function: Function, dtype: str, names=SOME, seeds=range(1, 2)) -> Iterator[Ruling]:
    for problem in problems(dtype, names, seeds):
        trial = plain(function, problem)
        if kept_scores.ORACLE.concerns(trial):
            yield kept_scores.ORACLE.rule(trial)


def words(found: list[Ruling]) -> set[str]:
    return {ruling.observed["scores"] for ruling in found}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", KEPT)
def test_functions_that_keep_their_scores_are_within_the_sharper_bounds(
    name: str, dtype: str
) -> None:
    found = list(rulings(KEPT[name], dtype))
    assert words(found) == {kept_scores.WITHIN}
    assert max(ruling.measures["sharper_out"] for ruling in found) > 0.2


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ROUNDED)
def test_functions_that_round_scores_are_seen_to_do_so(name: str, dtype: str) -> None:
    found = list(rulings(ROUNDED[name], dtype))
    assert all(map(acquitted, found))
    # a factor that is a power of two rounds nothing but subnormal products
    expected = {kept_scores.WITHIN, kept_scores.ROUNDED, kept_scores.UNDECIDED}
    assert words(found) <= expected - ({kept_scores.UNDECIDED} if name != "k" else set())
    assert kept_scores.ROUNDED in words(found)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", LATER)
def test_roundings_behind_the_scores_convict_no_function(name: str, dtype: str) -> None:
    assert all(map(acquitted, rulings(LATER[name], dtype)))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [*KEPT, *ROUNDED, *LATER])
def test_no_honest_function_is_convicted(name: str, dtype: str) -> None:
    """Of every distribution, over many seeds."""
    function = (KEPT | ROUNDED | LATER)[name]
    found = list(rulings(function, dtype, ordinary(), range(100, 104)))
    assert all(map(acquitted, found))
    assert len(found) > 60


@pytest.mark.parametrize(("dtype", "error"), [("float16", 3e-3), ("bfloat16", 1.2e-2)])
@pytest.mark.parametrize("function", [upcast, half_weights])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_wrong_scale_that_the_weakest_arithmetic_excuses_is_convicted(
    dtype: str, error: float, function, sign: int
) -> None:
    problem = next(problems(dtype, ("low_rank",), range(3, 4)))
    trial = plain(function(sign * error), problem)
    assert acquitted(bound.judge(trial))
    convicted(kept_scores.judge(trial), "rounds no scores")
    assert acquitted(kept_scores.judge(plain(function(), problem)))


def test_a_smaller_one_is_undecided() -> None:
    """A tenth of what the weakest arithmetic sees."""
    problem = next(problems("bfloat16", ("low_rank",), range(3, 4)))
    ruling = kept_scores.judge(plain(upcast(2e-3), problem))
    assert acquitted(ruling)
    assert words([ruling]) == {kept_scores.UNDECIDED}
    assert ruling.measures["sharper_out"] > 1


def skipping(weights: Tensor, scores: Tensor) -> Tensor:
    return torch.where(weights < 1e-3, 0.0, weights)


def coarse(weights: Tensor, scores: Tensor) -> Tensor:
    return weights * (1 + 0.01 * torch.sin(40 * scores))


@pytest.mark.parametrize("fault", [skipping, coarse])
def test_skipped_keys_and_coarse_exponentials_are_convicted(fault) -> None:
    """Both by less than the weakest arithmetic excuses."""

    def function(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
        scores = wide_scores(q, k, seen, scale)
        weights = fault(torch.softmax(scores, -1), scores)
        return (weights / weights.sum(-1, keepdim=True)).to(q.dtype) @ v

    problem = Problem(**SHAPES[0], batch=1, dtype="float16", distribution="outliers", seed=3)
    trial = plain(function, problem)
    assert acquitted(bound.judge(trial))
    convicted(kept_scores.judge(trial), "rounds no scores")


def test_an_arithmetic_that_lengths_choose_is_no_fault() -> None:
    """Scores are rounded if the number of keys is even: the second launch has as many."""

    def function(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
        chosen = eager if k.shape[2] % 2 == 0 else half_weights()
        return chosen(q, k, v, seen, scale)

    found = list(rulings(function, "float16"))
    assert all(map(acquitted, found))
    assert kept_scores.ROUNDED in words(found)


def test_an_error_that_does_not_show_again_is_undecided() -> None:
    wrong = iter([True, False, False])
    problem = next(problems("float16", ("low_rank",), range(3, 4)))

    def function(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
        return half_weights(3e-3 if next(wrong) else 0.0)(q, k, v, seen, scale)

    ruling = kept_scores.judge(plain(function, problem))
    assert acquitted(ruling)
    assert words([ruling]) == {kept_scores.UNDECIDED}


def test_products_that_are_subnormal_for_the_judged_values_alone_are_undecided() -> None:
    """k times a power of two is exact, except where it is subnormal: such a function was
    convicted."""
    problem = Problem(
        batch=1,
        heads_q=2,
        heads_kv=1,
        seqlen_q=24,
        seqlen_kv=40,
        head_dim=64,
        dtype="float16",
        distribution="subnormals",
        seed=1,
    )
    ruling = kept_scores.judge(plain(ROUNDED["k"], problem))
    assert ruling.measures["sharper_out"] > 1
    assert words([ruling]) == {kept_scores.UNDECIDED}
    telling = Telling.of(problem)
    assert telling is not None
    assert not telling.exact_for(*plain(eager, problem).expanded[:2])


def test_rows_that_see_one_key_tell_nothing() -> None:
    """Whatever is rounded, the weight of the only key is 1."""
    problem = Problem(
        batch=1,
        heads_q=1,
        heads_kv=1,
        seqlen_q=1,
        seqlen_kv=1,
        head_dim=64,
        dtype="float16",
        seed=1,
    )
    trial = plain(lambda q, k, v, seen, scale: v * 1.01, problem)
    telling = Telling.of(problem)
    assert telling is not None
    trial.run("telling", inputs=telling.inputs)
    arithmetic = kept_scores._arithmetic(trial)
    right = plain(upcast(), problem).run("telling", inputs=telling.inputs)
    assert right.out is not None
    assert kept_scores._keeps(trial, telling, right.out, arithmetic) == (True, False)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [0.125, 0.25, 0.1, 2.0, -0.125])
def test_every_rounding_shows_in_the_second_launch(dtype: str, scale: float) -> None:
    """By emulation of the launch, not by the oracle's own prediction."""
    shorts = {
        "scores": lambda q, k, s, short: short(q @ k.mT) * s,
        "scaled": lambda q, k, s, short: short(q @ k.mT * s),
        "q": lambda q, k, s, short: short(q * s) @ k.mT,
        "k": lambda q, k, s, short: q @ short(k * s).mT,
        "base 2": lambda q, k, s, short: short(q * s * 1.4427) @ k.mT / 1.4427,
    }
    problem = Problem(
        batch=1,
        heads_q=1,
        heads_kv=1,
        seqlen_q=4,
        seqlen_kv=33,
        head_dim=64,
        dtype=dtype,
        seed=5,
        softmax_scale=scale,
    )
    telling = Telling.of(problem)
    assert telling is not None
    exact = math.frexp(scale)[0] in (0.5, -0.5)
    assert len(telling.roundings()) == {0.25: 12}.get(scale, 14 if exact else 18)
    trial = plain(half_weights(), problem)
    arithmetic = kept_scores._arithmetic(trial)
    kept = trial.run("telling", inputs=telling.inputs)
    assert kept_scores._keeps(trial, telling, kept.out, arithmetic) == (True, True)
    for name, scores in shorts.items():
        launch = plain(rounding(scores), problem).run("telling", inputs=telling.inputs)
        keeps, certain = kept_scores._keeps(trial, telling, launch.out, arithmetic)
        assert certain
        assert keeps == (exact and name in ("q", "k")), name


def test_what_leaves_no_freedom_is_not_asked() -> None:
    assert keeping(Numerics(), "float16") is None
    problem = Problem(seqlen_q=8, seqlen_kv=8, head_dim=64, dtype="float32")
    assert not kept_scores.ORACLE.concerns(plain(upcast(), problem))
    assert kept_scores.ORACLE.excludes(plain(upcast(), problem).declaration) is None


@pytest.mark.parametrize("changes", [{"head_dim": 8}, {"softmax_scale": 2.0**-12}])
def test_problems_without_telling_values(changes: dict[str, object]) -> None:
    values = {"seqlen_q": 8, "seqlen_kv": 8, "head_dim": 64, "mask": Full()} | changes
    assert Telling.of(Problem(**values, dtype="float16")) is None


def test_lse_beyond_the_sharper_bound_is_undecided() -> None:
    """It may come from other scores than O, which the second launch does not tell."""
    problem = next(problems("bfloat16", ("normal",), range(3, 4)))
    right = plain(upcast(), problem, lse_of)
    assert words([kept_scores.judge(right)]) == {kept_scores.WITHIN}
    off = plain(upcast(), problem, lambda *given: lse_of(*given) + 1e-3)
    ruling = kept_scores.judge(off)
    assert acquitted(ruling)
    assert words([ruling]) == {kept_scores.UNDECIDED}


def test_report_and_oracle_use_the_same_words() -> None:
    assert (reported.WITHIN, reported.ROUNDED, reported.UNDECIDED) == (
        kept_scores.WITHIN,
        kept_scores.ROUNDED,
        kept_scores.UNDECIDED,
    )
    assert kept_scores.ORACLE.name == kept_scores.NAME


def test_visibility_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that would have to show more than it can convicts no function."""
    problem = next(problems("float16", ("low_rank",), range(3, 4)))
    monkeypatch.setattr(judging, "VISIBLE", 1e6)
    assert acquitted(kept_scores.judge(plain(half_weights(3e-3), problem)))


def test_other_oracles_have_launches_of_their_own() -> None:
    """`repeat` looks for unwritten elements in a launch over another poison."""
    problem = next(problems("float16", ("low_rank",), range(3, 4)))
    trial = plain(half_weights(3e-3), problem)
    convicted(kept_scores.judge(trial))
    assert set(trial.launches) == {"first", "telling", "after telling"}
    repeat.judge(trial)
    assert trial.launches["again"].poison == "huge"
