"""Premises: what a feature breaks decides which oracles are asked, and by default none is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest import mock

import pytest

from references.premises import EVERY_PREMISE, Feature, Premise
from references.quantisation import parse_quantisation
from references.score_mods import Softcap
from tests.harness.fake_trials import DECLARED, PLAIN, tried
from verify.campaign.targets import Target, excludes_problem
from verify.oracles import groups, oracles
from verify.problem import Problem
from verify.problem.known_answers import gather_possible
from verify.problem.premises import broken, without_broken
from verify.problem.sampling import draws

CAPPED = PLAIN.but(score_mod=Softcap(2.0))
SCALED = PLAIN.but(dtype="float8_e4m3fn", quantisation=parse_quantisation("head"))
LINEAR = frozenset({Premise.LINEAR_SCORES})
SUPPORT = replace(
    DECLARED.support,
    dtypes=("float32", "float8_e4m3fn"),
    score_mods=("softcap",),
    descalings=("none", "head"),
)


@dataclass(frozen=True)
class Unheard:
    """A feature that no oracle has heard of."""

    label: str = "telepathy"
    breaks: frozenset[Premise] = EVERY_PREMISE


def with_feature(feature: Feature) -> mock._patch:  # type: ignore[type-arg]
    """While it holds, every problem has that feature, too."""
    before = Problem.features.func  # type: ignore[attr-defined]
    both = property(lambda problem: (*before(problem), feature))
    return mock.patch.object(Problem, "features", both)


def test_what_is_broken_is_said_with_premise_and_feature() -> None:
    assert broken(LINEAR, PLAIN) is None
    assert broken(LINEAR, CAPPED) == "needs linear_scores, which softcap breaks"
    assert broken(LINEAR, SCALED) is None
    both = frozenset({Premise.UNBOUNDED_SCORES, Premise.LINEAR_SCORES, Premise.PLAIN_INPUTS})
    words = "needs linear_scores and unbounded_scores, which softcap breaks"
    assert broken(both, CAPPED) == words
    assert broken(both, SCALED) == "needs plain_inputs, which descales by head breaks"


def test_an_oracle_that_names_no_premises_is_asked_about_no_feature() -> None:
    assert broken(None, PLAIN) is None
    assert broken(None, CAPPED) == "names no premises, and softcap is a feature"
    assert broken(frozenset(), CAPPED) is None


def test_what_is_broken_is_left_out_where_the_support_allows_it() -> None:
    assert without_broken(LINEAR, CAPPED, SUPPORT) == PLAIN
    assert without_broken(LINEAR, SCALED, SUPPORT) == SCALED
    both = SCALED.but(score_mod=Softcap(2.0))
    assert without_broken(None, both, SUPPORT) == both.but(
        score_mod=None, quantisation=parse_quantisation("none")
    )
    narrow = replace(SUPPORT, descalings=("head",))
    assert without_broken(None, both, narrow) == SCALED
    with with_feature(Unheard()):
        assert without_broken(LINEAR, CAPPED, SUPPORT) == PLAIN


def test_an_oracle_rules_only_where_its_premises_hold() -> None:
    asked = replace(next(o for o in oracles() if o.name == "bound"), needs=LINEAR)
    assert asked.rule(tried(PLAIN)).inapplicable is None
    ruling = asked.rule(tried(CAPPED))
    assert ruling.inapplicable == "needs linear_scores, which softcap breaks"
    assert ruling.finding is None
    assert replace(asked, concerns=lambda trial: False).rule(tried(PLAIN)).inapplicable == ""


@pytest.mark.parametrize("name", sorted(groups()))
def test_a_group_asks_no_oracle_what_its_premises_forbid(name: str) -> None:
    """An unheard-of feature leaves those oracles alone that need nothing."""
    asked = [oracle for oracle in oracles() if oracle.group == name]
    target = Target(DECLARED, DECLARED.configs[0], "float32", name)
    with with_feature(Unheard()):
        reasons = {oracle.name: broken(oracle.needs, PLAIN) for oracle in asked}
        assert all((reasons[o.name] is None) is (not o.needs) for o in asked)
        assert (excludes_problem(target, PLAIN) is None) is (None in reasons.values())


def test_a_group_draws_without_the_features_that_it_cannot_ask() -> None:
    declaration = replace(DECLARED, support=SUPPORT)
    for name in ("key_shift", "dyadic", "gather"):
        found = draws(Target(declaration, declaration.configs[0], "float32", name).problems, 40)
        assert found
        assert not any(problem.score_mod for problem in found)
    target = Target(declaration, declaration.configs[0], "float32", "linearity")
    assert any(problem.score_mod for problem in draws(target.problems, 40))
    assert target.fitted(CAPPED) == CAPPED
    with with_feature(Unheard()):
        assert target.fitted(CAPPED) is None


def test_a_known_answer_names_the_feature_for_which_it_cannot_be_built() -> None:
    words = "needs linear_scores, which softcap breaks"
    assert gather_possible(PLAIN.but(distribution="gather", score_mod=Softcap(2.0))) == words
