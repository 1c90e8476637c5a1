"""The order in which failing verdicts are explained."""

from __future__ import annotations

from dataclasses import replace

from tests.harness.fake_campaign import verdict
from verify.evidence import Verdict
from verify.evidence.explanation import smallest
from verify.statistics.verdicts import GROUP, ORACLE


def failing(case: str, **changes: str) -> Verdict:
    return replace(verdict("mine", "float16", 1), case=case, **changes)


def test_the_shortest_case_of_each_oracle_stands_for_it() -> None:
    long, short, other = failing("a longer case"), failing("a case"), failing("b", oracle="memory")
    assert smallest([long, other, short]) == [short, other]


def test_what_only_all_cases_show_comes_last() -> None:
    whole = failing("a", oracle=ORACLE, group=GROUP)
    one, two = failing("a case"), failing("another", oracle="memory")
    assert smallest([whole, one, two]) == [one, two, whole]
