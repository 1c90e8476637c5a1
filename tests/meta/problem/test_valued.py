"""Problems of other values: what `Problem.valued` takes over is what a problem made from its name
has."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from references.masks import Causal, Lengths
from tests.meta.problem.test_problem import drawn
from verify.judging.stacked import shape_class
from verify.problem import Layout, Problem, ProblemError
from verify.problem.coverage import coverage_bins
from verify.problem.distributions import ordinary
from verify.tolerance.forward import resolve
from verify.variant import Config, Numerics, Softmax

CONFIGS = (Config(), Config(block_m=16, block_n=16, num_warps=4))
values = st.tuples(st.sampled_from(ordinary()), st.integers(0, 1 << 40))


@given(drawn, values, values)
@settings(max_examples=60)
def test_it_is_the_problem_of_that_name(
    problem: Problem, one: tuple[str, int], other: tuple[str, int]
) -> None:
    assert problem.name  # known before
    for made in (problem.valued(*one), problem.valued(*one).valued(*other)):
        whole = dataclasses.replace(problem, distribution=made.distribution, seed=made.seed)
        assert made == whole
        assert hash(made) == hash(whole)
        assert made.name == whole.name
        fresh = Problem.parse(made.name)
        assert fresh == whole
        assert (made.features, made.layouts, made.shapes) == (
            (fresh.features, fresh.layouts, fresh.shapes)
        )
        assert made.plain_valued == fresh.plain_valued == problem.plain_valued
        assert made.plain_valued is problem.plain_valued, "what is asked of it is kept once"
        assert shape_class(made) == shape_class(fresh)
    assert vars(problem)["name"] == Problem.parse(problem.name).name


def test_other_values_fill_their_own_bins() -> None:
    problem = Problem(
        batch=2,
        seqlen_q=40,
        seqlen_kv=70,
        head_dim=16,
        dtype="bfloat16",
        mask=Lengths((40, 3), (70, 9)),
        layout_q=Layout("bhsd", 3),
        seed=5,
    )
    for config in CONFIGS:
        bins = {
            name: coverage_bins(problem.valued(name, 1), config)
            for name in ("normal", "increasing", "sink")
        }
        for name, found in bins.items():
            assert [each for each in found if each.startswith("distribution:")] == [
                f"distribution:{name}"
            ]
        assert bins["increasing"] - bins["normal"] == {"late_maximum", "distribution:increasing"}
        assert bins["normal"] - bins["sink"] == {"distribution:normal"}
    empty = problem.but(seqlen_kv=0, mask=Causal())
    assert coverage_bins(empty.valued("increasing", 1), CONFIGS[1]) == {"zero_length", "empty_row"}


def test_the_arithmetic_is_resolved_once_for_all_values_but_those_of_factors() -> None:
    numerics, config = Numerics(softmax=Softmax(exp="ex2.approx")), CONFIGS[1]
    plain = Problem(seqlen_q=8, seqlen_kv=24, head_dim=16, dtype="float16", seed=3)
    one, other = (
        resolve(numerics, config, plain.valued(name, seed), "sm_90")
        for name, seed in (("sink", 11), ("outliers", 12))
    )
    assert one is other
    assert one == resolve(numerics, config, plain.but(seed=11, distribution="sink"), "sm_90")
    scaled = Problem.parse("hq=2,hkv=2,sq=8,skv=24,d=16,dtype=float8_e4m3fn,descale=head,seed=3")
    one, other = (
        resolve(numerics, config, scaled.valued("normal", seed), "sm_90") for seed in (11, 12)
    )
    assert one != other, "its factors follow from the seed"
    assert one == resolve(numerics, config, scaled.but(seed=11), "sm_90")


@pytest.mark.parametrize(
    ("bad", "told"),
    [(("normal", -1), "seed: -1 is negative"), (("no name", 1), "distribution: 'no name' is not")],
)
def test_values_that_make_no_sense_are_refused(bad: tuple[str, int], told: str) -> None:
    problem = Problem(seqlen_q=8, seqlen_kv=24, head_dim=16, dtype="float16")
    with pytest.raises(ProblemError, match=told):
        problem.valued(*bad)
    with pytest.raises(ProblemError, match=told):
        problem.but(distribution=bad[0], seed=bad[1])
