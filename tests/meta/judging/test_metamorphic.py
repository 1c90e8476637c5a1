"""Relations: a right kernel passes them all, and each convicts a fault of which the bound says
nothing on the same problem."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings

from references.masks import GALLERY, Causal, Dense, Full, Lengths, Mask, intersect, parse_mask
from references.quantisation import ByHead
from tests.harness.fake_trials import DECLARED, convicted, right_run, trial_of
from tests.harness.property_cases import Bench, bench
from verify.arithmetic.dtypes import dtype_named
from verify.arithmetic.rounding import cast
from verify.campaign.targets import Target
from verify.judging.metamorphic import (
    RelatedResult,
    check_same_bits,
    check_within_bounds,
    leading_bit,
)
from verify.judging.parts import Part
from verify.oracles import groups, of_group
from verify.oracles.duplicated_keys import doubled
from verify.oracles.key_permutation import permutation
from verify.oracles.key_shift import shifted
from verify.oracles.split_merge import merge
from verify.problem import Layout, Problem
from verify.problem.refusal import inside
from verify.variant import MASK_KINDS, Contract

torch.set_num_threads(1)

GROUPS = tuple(
    name
    for name, group in groups().items()
    if group.family == "relations" and group.entry == "forward"
)
SQUARE = Problem(
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=24,
    seqlen_kv=24,
    head_dim=16,
    dtype="float32",
    mask=Causal(),
    seed=11,
)
FREE = SQUARE.but(mask=Full(), seqlen_kv=40)
RAGGED = SQUARE.but(mask=Lengths((24, 9), (17, 24)), seed=8)
INTEGERS = SQUARE.but(distribution="small_integers", head_dim=64)

# (group, fault) -> (problem, words of the finding)
FAULTS = {
    ("key_permutation", "maximum-of-first-key"): (
        FREE.but(batch=1, heads_q=2, heads_kv=1, distribution="decreasing", seqlen_kv=400),
        "keys permuted",
    ),
    ("key_shift", "maximum-from-zero"): (INTEGERS, "one vector added to every key"),
    ("duplicated_keys", "ties-once"): (FREE, "every key doubled"),
    ("split_merge", "lse-zero-without-key"): (RAGGED, "merged from keys 0..18 and 18..24"),
    ("linearity", "lse-sees-values"): (FREE, "lse should keep its bits"),
    ("causality", "leaks-hidden-values"): (SQUARE, "out should keep its bits"),
    ("causality", "leaks-queries"): (FREE, "with query 23 changed: out should keep its bits"),
    ("decode_step", "top-left-decode"): (SQUARE.but(seed=12), "the last 1 of 24 rows alone"),
    ("replicated_heads", "head-map"): (SQUARE, "stored once for each"),
    ("slice", "leaks-batch"): (SQUARE.but(seed=12), "with sequence 0 alone"),
}


@pytest.fixture(scope="module")
def related(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench("related.py", tmp_path_factory.mktemp("related")) as opened:
        yield opened


@pytest.mark.parametrize(("group", "fault"), FAULTS)
def test_a_fault_that_the_bound_does_not_see_is_convicted(
    group: str, fault: str, related: Bench
) -> None:
    related.check_caught(group, fault, *FAULTS[group, fault])


def test_each_of_these_groups_has_one_oracle_of_its_own_name() -> None:
    found = {group for group, _ in FAULTS}
    assert found <= set(GROUPS)
    assert all([oracle.name for oracle in of_group(name)] == [name] for name in found)


@pytest.mark.parametrize("group", ["causality", "slice"])
def test_where_runs_may_differ_bounds_decide(group: str, related: Bench) -> None:
    """The same leaks, of one bit, are no faults of a kernel that does not promise its bits."""
    free = Contract(deterministic=False)
    for fault, problem in (
        ("right", SQUARE.but(seed=12)),
        ("leaks-hidden-values", SQUARE),
        ("leaks-batch", SQUARE.but(seed=12)),
    ):
        assert related.verdict(fault, group, group, problem, contract=free).outcome == "pass"


# Judging.


def result(
    after: float, *, before: float = 1.0, truth: float = 1.0, output: str = "float32"
) -> RelatedResult:
    """One element, each result with a bound of 0.25."""
    one = [
        torch.full((1, 1, 1, 1), x, dtype=torch.float64) for x in (before, 0.25, after, 0.25, truth)
    ]
    return RelatedResult("out", *one, dtype_named(output))


def test_results_are_held_against_the_truth_and_against_each_other() -> None:
    ruling = check_within_bounds("slice", "with a slice alone", [result(1.2)])
    assert ruling.finding is None
    assert ruling.measures == pytest.approx({"same_bits_out": 0.0, "apart_out": 0.4})
    convicted(
        check_within_bounds("slice", "with a slice alone", [result(1.3)]),
        "with a slice alone: out is off by 0.3",
    )
    words = (
        "is 0.6 by one result and 1.2 by the other",
        "both bounds together allow 0.5",
        "out[b=0, h=0, q=0, d=0]",
    )
    convicted(check_within_bounds("slice", "with a slice alone", [result(1.2, before=0.6)]), *words)
    for wrong in (math.nan, math.inf):
        convicted(check_within_bounds("slice", "with a slice alone", [result(wrong)]), "out")
    assert (
        check_within_bounds(
            "slice", "", [result(math.inf, truth=65530.0, before=65504.0, output="float16")]
        ).finding
        is None
    )
    unasked = replace(result(9.0), asked=torch.zeros(1, 1, 1, dtype=torch.bool))
    assert check_within_bounds("slice", "", [unasked]) == check_within_bounds("slice", "", [])


def test_bits_may_differ_only_in_the_sign_of_zero_and_where_nothing_is_asked() -> None:
    before, after = torch.tensor([[[0.0, 1.0, 2.0]]]), torch.tensor([[[-0.0, 1.0, 2.0]]])
    assert check_same_bits("slice", "alone", [("lse", before, after)]).finding is None
    after[0, 0, 1] += 2.0**-23
    convicted(
        check_same_bits("slice", "alone", [("lse", before, after)]),
        "alone: lse should keep its bits",
        "lse[b=0, h=0, q=1]",
    )
    asked = torch.tensor([[[True, False, True]]])
    assert (
        check_same_bits("slice", "alone", [("lse", before, after)], {"lse": asked}).finding is None
    )


# Parts, doubles, orders.


RAGGED_MASKS = [
    intersect(
        *(Lengths((10, 7), (20, 24)) if isinstance(atom, Lengths) else atom for atom in mask.atoms)
    )
    for mask in GALLERY
]
# What no mask of the suite shows of a square problem: queries that stand before the first key of a
# document or behind its last, a prefix behind a diagonal, and random pairs but the first.
UNSEEN = {
    "documents.5_8_9": {"last keys", "first keys"},
    "causal+documents.5_8_9": {"first keys"},
    "prefix.6": {"first keys"},
    "dense.40.7": {"last rows", "last keys"},
    "causal+dense.60.7": {"last rows", "last keys"},
}


@pytest.mark.parametrize("mask", RAGGED_MASKS, ids=lambda mask: mask.name)
def test_a_part_sees_what_the_whole_shows_it(mask: Mask) -> None:
    support = replace(DECLARED.support, masks=MASK_KINDS, intersections=True)
    whole = SQUARE.but(mask=mask)
    parts = {
        "last rows": Part.of(whole, rows=range(5, 24)),
        "last keys": Part.of(whole, keys=range(9, 24)),
        "first keys": Part.of(whole, keys=range(9)),
        "sequence": Part.of(whole, batch=range(1)),
        "head": Part.of(whole, batch=range(1), heads_kv=range(1)),
    }
    found = {name: part.problem(whole, support) for name, part in parts.items()}
    assert {name for name, problem in found.items() if problem is None} == UNSEEN.get(
        mask.name, set()
    )
    dense = mask.dense(2, 4, 24, 24)
    for name, problem in found.items():
        if problem is not None:
            ranges = (
                parts[name].batch,
                parts[name].heads_q(whole),
                parts[name].rows,
                parts[name].keys,
            )
            cut = dense[tuple(slice(n.start, n.stop) for n in ranges)]
            assert torch.equal(problem.mask.dense(*problem.shape_q[:3], problem.seqlen_kv), cut), (
                name
            )


def test_a_part_keeps_its_kind_of_mask_and_its_values() -> None:
    whole = SQUARE.but(
        layout_k=Layout(expand="b"),
        layout_v=Layout(expand="h"),
        dtype="float8_e4m3fn",
        quantisation=ByHead(),
    )
    support = replace(DECLARED.support, dtypes=("float8_e4m3fn",), descalings=("head",))
    part = Part.of(whole, batch=range(1, 2), heads_kv=range(1, 2), rows=range(20, 24))
    alone, trial = part.problem(whole, support), trial_of(whole)
    assert alone is not None
    assert alone.mask == Causal()
    other = trial.beside("part", alone, inputs=part.inputs(trial))
    for ours, theirs in zip(other.expanded, trial.expanded, strict=True):
        heads = part.heads_q(whole) if theirs.shape[1] == 4 else part.heads_kv
        cut = theirs[1:2, heads.start : heads.stop]
        assert torch.equal(ours, cut[:, :, 20:] if theirs.shape[1] == 4 else cut)
    assert other.inputs.others["descale_k"].shape == (1, 1)


@pytest.mark.parametrize("mask", RAGGED_MASKS, ids=lambda mask: mask.name)
def test_doubled_rows_see_both_copies(mask: Mask) -> None:
    problem = SQUARE.but(seqlen_q=12, mask=mask)
    if any(isinstance(atom, Dense) for atom in mask.atoms):
        with pytest.raises(ValueError, match="cannot be doubled"):
            doubled(problem)
        return
    twice = doubled(problem)
    seen, both = (p.mask.dense(2, 1, p.seqlen_q, p.seqlen_kv) for p in (problem, twice.problem))
    assert torch.equal(both[:, :, 1::2] if twice.rows else both, seen[..., twice.positions(24)])


@pytest.mark.parametrize("mask", RAGGED_MASKS, ids=lambda mask: mask.name)
def test_keys_move_only_among_those_that_the_same_rows_see(mask: Mask) -> None:
    problem = SQUARE.but(seqlen_q=12, mask=mask)
    order, seen = permutation(problem), mask.dense(2, 4, 12, 24)
    assert torch.equal(order.sort().values, torch.arange(24))
    assert torch.equal(seen, seen[..., order])
    if mask in (Full(), parse_mask("lengths.10_7.20_24")):
        assert int((order != torch.arange(24)).sum()) > 12


# Values.

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("name", DTYPES)
def test_leading_bits_and_the_rest_add_up(name: str) -> None:
    dtype = dtype_named(name)
    values = torch.cat(
        (
            torch.linspace(-4, 4, 1001, dtype=torch.float64),
            torch.tensor([0.0, dtype.smallest_subnormal, 1.0, dtype.max]),
        )
    )
    whole = cast(values.numpy(), dtype)
    lead, rest = leading_bit(whole, dtype)
    assert torch.equal(lead.double() + rest.double(), whole.double())
    assert bool((rest.double().abs() <= lead.double().abs()).all())
    assert torch.equal(
        torch.frexp(lead.double())[0].abs(), torch.where(whole.double() == 0, 0.0, 0.5)
    )


@pytest.mark.parametrize("name", DTYPES)
def test_keys_are_shifted_exactly(name: str) -> None:
    problem = INTEGERS.but(dtype=name, layout_k=Layout(expand="h"))
    trial = trial_of(problem)
    moved = shifted(trial).double() - trial.inputs.k.double()
    assert torch.equal(moved, moved[:, :, :1].expand(moved.shape))
    assert moved.abs().max() >= 2 * 2 ** min(dtype_named(name).precision - 2, 6)


# Merging.


def test_the_merged_bound_holds_and_says_something() -> None:
    """Parts moved to the ends of their bounds, in all directions, stay within the merged one, and
    come near it."""
    whole = trial_of(RAGGED.but(dtype="float16"))
    parts = [Part.of(whole.problem, keys=keys) for keys in (range(18), range(18, 24))]
    trials = []
    for part in parts:
        problem = part.problem(whole.problem, DECLARED.support)
        assert problem is not None
        trials.append(whole.beside(str(part.keys), problem, inputs=part.inputs(whole)))
    nearest = 0.0
    for signs in range(16):
        for i, trial in enumerate(trials):
            run, truth = right_run(trial), trial.truth
            moves = [(-1) ** (signs >> (2 * i + bit)) for bit in range(2)]
            out = truth.out + moves[0] * truth.out_bound
            lse = truth.lse + moves[1] * truth.lse_bound
            trial.launches["first"] = replace(run, outputs={"out": out, "lse": lse})
        merged, truth = merge(trials), whole.truth
        live = ~truth.empty
        error, bound = (merged.out - truth.out).abs()[live], merged.out_bound[live]
        assert bool((error <= bound * (1 + 1e-9) + 1e-15).all())
        assert bool(((merged.lse - truth.lse).abs() <= merged.lse_bound + 1e-15)[live].all())
        assert bool((merged.lse == -math.inf)[truth.empty].all())
        nearest = max(nearest, float((error / bound).max()))
    assert nearest > 0.9


# Supports.


@pytest.mark.first_look(7)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("masks", [("full",), ("full", "dense"), MASK_KINDS], ids="-".join)
def test_what_is_asked_lies_inside_the_support(group: str, masks: tuple[str, ...]) -> None:
    """Hardly anything that is drawn is lost, whatever the support has."""
    support = replace(
        DECLARED.support,
        masks=masks,
        intersections=True,
        layouts="aligned",
        head_dims=range(16, 65, 16),
    )
    declaration = replace(DECLARED, support=support)
    if any(oracle.excludes(declaration) is not None for oracle in of_group(group)):
        return
    found: list[Problem] = []

    @settings(
        max_examples=25, database=None, deadline=None, derandomize=True, phases=[Phase.generate]
    )
    @given(Target(declaration, declaration.configs[0], "float16", group).problems)
    def collect(problem: Problem) -> None:
        found.append(problem)

    collect()
    assert found
    assert all(inside(support, problem) for problem in found)
