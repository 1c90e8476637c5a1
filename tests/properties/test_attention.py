"""What an attention kernel must hold.  Each test hears every variant, config and dtype; the
problems are drawn inside what the variant declares (for the last one, just outside).  `target`
comes from the variants found, `judge` from conftest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import tier
from tests.properties.property_runner import Convicted, check_all_are_asked, hold, hold_first
from verify.campaign.covering import covering
from verify.campaign.edge_cases import edge_cases
from verify.campaign.judge import Judge
from verify.campaign.targets import Target
from verify.cell.discovery import Unloadable

pytestmark = pytest.mark.filterwarnings("error")


@tier.first_tier(tier.variant_and_dtype)
@pytest.mark.long(40)  # where each problem is another build
@pytest.mark.targets_of("accuracy")
@given(data=st.data())
def test_is_within_its_bounds_and_contract(
    target: Target, judge: Judge, data: st.DataObject
) -> None:
    """O and LSE lie within their derived tolerances, empty rows are as promised, nothing else is
    touched, twice the same."""
    hold(judge, target, data)


@tier.first_tier(tier.source_file)
@pytest.mark.long(10)
@pytest.mark.covers
def test_fills_its_coverage_bins(target: Target, judge: Judge) -> None:
    """Every edge that the support allows is visited, however few random problems there are."""
    for problem in edge_cases(target):
        hold(judge, target, problem)


@pytest.mark.long(40)  # the draws of all pairs, then a hundred problems
@pytest.mark.covers(profiles=("gpu", "nightly"), leading=True)
def test_meets_every_pair_of_levels(target: Target, judge: Judge) -> None:
    """Any two levels of two factors that a problem of the support can have, some case has."""
    for problem in covering(target, edge_cases(target)):
        hold(judge, target, problem)


@tier.first_tier(tier.variant)
@pytest.mark.targets_of("counting")
@given(data=st.data())
def test_counts_the_visible_keys(target: Target, judge: Judge, data: st.DataObject) -> None:
    """With Q = 0, O and LSE count keys: every mask, window, length and alignment, exactly."""
    hold(judge, target, data)


@tier.first_tier(tier.variant)
@pytest.mark.targets_of("gather")
@given(data=st.data())
def test_gathers_the_right_row(target: Target, judge: Judge, data: st.DataObject) -> None:
    """With one winning key per row, O is that row of V, bit for bit."""
    hold(judge, target, data)


@tier.first_tier(tier.variant)
@pytest.mark.targets_of("poison")
@given(data=st.data())
def test_ignores_what_is_masked(target: Target, judge: Judge, data: st.DataObject) -> None:
    """NaN or huge values where no query looks change no bit."""
    hold(judge, target, data)


@tier.first_tier(tier.source_file)
@pytest.mark.family_targets("exact")
@given(data=st.data())
def test_answers_exactly(targets: tuple[Target, ...], judge: Judge, data: st.DataObject) -> None:
    """Inputs whose results are known, or scale, bit for bit give just these."""
    hold(judge, data.draw(st.sampled_from(targets), label="question"), data, targets)


@tier.first_tier(tier.source_file)
@pytest.mark.family_targets("relations")
@given(data=st.data())
def test_holds_its_relations(
    targets: tuple[Target, ...], judge: Judge, data: st.DataObject
) -> None:
    """Related inputs have related results: one relation a case, bitwise or within the bounds of
    both results."""
    hold(judge, data.draw(st.sampled_from(targets), label="relation"), data, targets)


@tier.first_tier(tier.source_file)
@pytest.mark.family_targets("exact")
def test_answers_each_question_once(targets: tuple[Target, ...], judge: Judge) -> None:
    """However few the draws are, each question of known answers is asked."""
    _hold_first_of_each(judge, targets)


@tier.first_tier(tier.source_file)
@pytest.mark.family_targets("relations")
def test_holds_each_relation_once(targets: tuple[Target, ...], judge: Judge) -> None:
    """And so is each relation."""
    _hold_first_of_each(judge, targets)


@tier.first_tier(tier.variant)
@pytest.mark.targets_of("contract")
def test_keeps_its_contract(target: Target, judge: Judge) -> None:
    """What raw outputs show of LSE, empty rows, alignment, softcap, NaN, heads, repetition and
    batches is what is declared."""
    _hold_each(judge, target)


@pytest.mark.targets_of("declared_numerics")
def test_computes_as_declared(target: Target, judge: Judge) -> None:
    """Accumulators, scores, P, row sum and exponential are no worse than what is declared of
    them."""
    _hold_each(judge, target)


@tier.first_tier(tier.toolchain)
@pytest.mark.long(5)
@pytest.mark.targets_of("lengths")
def test_counts_and_gathers_at_long_lengths(target: Target, judge: Judge) -> None:
    """Beside powers of two up to 8192, no row and no key is lost, doubled or taken for another."""
    _hold_each(judge, target)


@pytest.mark.first_look(1)
@tier.first_tier(tier.source_file)
@pytest.mark.long(30)  # on a GPU
@pytest.mark.targets_of("long")
def test_is_right_over_long_sequences(target: Target, judge: Judge) -> None:
    """Past 131072 rows and keys: chosen rows within their bounds, and what costs no square on all
    of them."""
    _hold_each(judge, target)


@pytest.mark.targets_of("refusal")
@given(data=st.data())
def test_refuses_what_it_does_not_support(
    target: Target, judge: Judge, data: st.DataObject
) -> None:
    """Just outside its support a kernel raises Unsupported, names the argument, and touches
    nothing."""
    hold(judge, target, data)


@tier.first_tier(tier.variant_and_dtype)
@pytest.mark.long(40)  # where each problem is another build
@pytest.mark.targets_of("gradients")
@given(data=st.data())
def test_gradients_are_within_their_bounds(
    target: Target, judge: Judge, data: st.DataObject
) -> None:
    """dQ, dK and dV, made from what a real forward saved, lie within their derived tolerances;
    nothing else is touched."""
    hold(judge, target, data)


@tier.first_tier(tier.variant)
@pytest.mark.targets_of("contract_backward")
def test_backward_keeps_its_contract(target: Target, judge: Judge) -> None:
    """Gradients repeat bit for bit where that is declared, and are zero where nothing is seen."""
    _hold_each(judge, target)


@tier.first_tier(tier.toolchain)
@pytest.mark.long(5)
@pytest.mark.targets_of("lengths_gradients")
def test_gradients_gather_at_long_lengths(target: Target, judge: Judge) -> None:
    """Beside powers of two up to 8192, dV scatters dO, and dQ and dK are 0."""
    _hold_each(judge, target)


@pytest.mark.first_look(1)
@tier.first_tier(tier.source_file)
@pytest.mark.long(30)  # on a GPU
@pytest.mark.targets_of("long_gradients")
def test_gradients_are_right_over_long_sequences(target: Target, judge: Judge) -> None:
    """Past 131072: chosen rows and keys, and all of them where one key wins."""
    _hold_each(judge, target)


@pytest.mark.targets_of("gradient_refusal")
@given(data=st.data())
def test_backward_refuses_what_it_does_not_support(
    target: Target, judge: Judge, data: st.DataObject
) -> None:
    """A backward, too, raises Unsupported just outside its support, names the argument, and touches
    nothing."""
    hold(judge, target, data)


def test_holds_where_it_was_worst(witness: tuple[Target, str], judge: Judge) -> None:
    """Declared worst cases, and cases that failed before."""
    hold(judge, *witness)


def test_loads(unloadable: Unloadable) -> None:
    """A kernel file imports and declares something."""
    pytest.fail(f"{unloadable.ref} does not load: {unloadable.message}", pytrace=False)


def _hold_each(judge: Judge, target: Target) -> None:
    """Hear every problem that the group asks, while the kernel runs; then the first failing verdict
    fails the test."""
    __tracebackhide__ = True
    found = []
    for problem in target.asked:
        try:
            hold(judge, target, problem)
        except Convicted as conviction:
            found.append(conviction)
            if type(conviction).__name__.endswith("execution"):
                break  # a kernel that hangs costs a deadline every time
    if found:
        raise found[0]


def _hold_first_of_each(judge: Judge, targets: tuple[Target, ...]) -> None:
    __tracebackhide__ = True
    for target in targets:
        hold_first(judge, target)


check_all_are_asked(list(globals().values()))
