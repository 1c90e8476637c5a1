"""The covering array: all pairs that draws have meet in few problems; reports name the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness.fake_campaign import verdict
from tests.harness.fake_trials import DECLARED
from verify.campaign import covering as module
from verify.campaign.covering import candidates, covering
from verify.campaign.targets import Target
from verify.evidence import Verdict
from verify.problem import Problem
from verify.problem.factors import met
from verify.problem.refusal import inside
from verify.report import pairs
from verify.variant import MASK_KINDS, Config


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(module, "_ROUNDS", 1)
    support = replace(DECLARED.support, masks=MASK_KINDS, min_seqlen=0)
    declaration = replace(DECLARED, support=support, interpreted=True)
    return Target(declaration, Config(block_m=64, block_n=32), "float16", "accuracy")


def pairs_of(target: Target, problems: list[Problem]) -> set[object]:
    return set(met((problem, target.config) for problem in problems))


@pytest.mark.for_ci
def test_few_problems_have_all_pairs_of_many(target: Target) -> None:
    every, chosen = candidates(target), covering(target)
    assert pairs_of(target, chosen) == pairs_of(target, every)
    assert len(chosen) < len(every) / 2
    assert all(inside(target.declaration.support, problem) for problem in chosen)
    # the last one is needed: it has a pair that no other has
    assert pairs_of(target, chosen[:-1]) < pairs_of(target, every)


@pytest.mark.for_ci
def test_pairs_that_have_met_are_not_asked_again(target: Target) -> None:
    chosen = covering(target)
    rest = covering(target, chosen[:20])
    assert len(rest) < len(chosen)
    assert pairs_of(target, [*chosen[:20], *rest]) == pairs_of(target, chosen)
    assert covering(target, chosen) == []


def judged(case: str) -> Verdict:
    return replace(verdict("v", "float16", 0), case=case)


def test_a_report_names_the_pairs_that_never_met() -> None:
    cases = ("sq=5,skv=9,d=64", "b=2,sq=9,skv=9,d=64")
    verdicts = [judged(f"v:m64n32:accuracy:{name},dtype=float16") for name in cases]
    found = pairs.report(pairs.met(verdicts))
    factors, moved = 11, 2  # batch and lengths
    same = factors - moved
    assert found["met"] == same * (same - 1) // 2 + 2 * (same * moved + 1)
    assert found["never"] == ["batch 1 with lengths equal", "batch 2 with lengths less"]
    unread = pairs.report(pairs.met([judged("v:default:accuracy:what no version reads")]))
    assert unread == {"met": 0, "never": [], "levels": {}}
