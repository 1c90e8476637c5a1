"""Relations of gradients: a right backward passes them all, and each convicts a fault that the
bound lets pass there."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from references.masks import Full
from tests.harness.property_cases import Bench, bench
from tests.meta.judging.test_metamorphic import SQUARE
from verify.arithmetic.dtypes import dtype_named
from verify.judging.metamorphic import part_bound
from verify.oracles import groups, of_group
from verify.problem import Problem
from verify.variant import Contract

torch.set_num_threads(1)

FREE = SQUARE.but(mask=Full())
HALF = FREE.but(dtype="float16")

# (group, fault) -> (problem, words of the finding)
FAULTS = {
    ("gradient_key_permutation", "forgets-late-keys"): (
        HALF.but(batch=1, heads_q=2, heads_kv=1, distribution="decreasing", seqlen_kv=300),
        "with its keys permuted: dk is off",
    ),
    ("gradient_linearity", "zero-is-padding"): (
        HALF.but(batch=1, heads_kv=1, seqlen_q=64),
        "as the sum of the gradients",
    ),
    ("gradient_causality", "leaks-hidden-rows"): (SQUARE, "dv should be 0"),
    ("gradient_causality", "leaks-hidden-keys"): (SQUARE, "changed: dq should keep its bits"),
    ("gradient_replicated_heads", "head-map"): (FREE, "stored once for each"),
    ("gradient_slice", "leaks-batch"): (SQUARE.but(seed=12), "dk should keep its bits"),
}


@pytest.fixture(scope="module")
def related(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench("related_backward.py", tmp_path_factory.mktemp("related")) as opened:
        yield opened


@pytest.mark.parametrize(("group", "fault"), FAULTS)
def test_a_fault_that_the_bound_does_not_see_is_convicted(
    group: str, fault: str, related: Bench
) -> None:
    related.check_caught(group, fault, *FAULTS[group, fault])


def test_every_relation_of_gradients_has_a_planted_fault() -> None:
    """Of those named so; each group has one oracle, of its own name."""
    found = {group for group, _ in FAULTS}
    assert found == {
        name
        for name, group in groups().items()
        if group.family == "relations" and name.startswith("gradient_")
    }
    assert all([oracle.name for oracle in of_group(name)] == [name] for name in found)


@pytest.mark.parametrize("group", ["gradient_causality", "gradient_slice"])
def test_where_runs_may_differ_bounds_decide(group: str, related: Bench) -> None:
    """What must be 0 must be 0 all the same; one bit less or more is no fault of a kernel that does
    not promise its bits."""
    free = Contract(deterministic_backward=False)
    for fault in ("right", "leaks-hidden-keys"):
        assert (
            related.verdict(fault, group, group, SQUARE.but(seed=12), contract=free).outcome
            == "pass"
        )
    verdict = related.verdict(
        "leaks-hidden-rows", "gradient_causality", "gradient_causality", SQUARE, contract=free
    )
    assert verdict.finding is not None


def test_heads_that_overflow_where_their_sum_does_not_are_no_fault(related: Bench) -> None:
    """dK of a single head may be rightly infinite in fp16, and that of the group finite; the same
    of two parts of dO."""
    cancelling = Problem.parse("hq=2,sq=32,skv=32,d=16,dtype=float16,scale=4.0,dist=subnormals")
    for group in ("gradient_replicated_heads", "gradient_linearity"):
        assert related.verdict("right", group, group, cancelling).outcome == "pass"
    large, bound, output = (
        torch.tensor([65000.0, 65519.0, -65519.0, 2.0]),
        torch.ones(4),
        dtype_named("float16"),
    )
    assert part_bound(bound, large, output).tolist() == [1.0, math.inf, math.inf, 1.0]
