"""What an attention kernel must hold.  Each test hears every variant, config and dtype; the problems are drawn inside what the
variant declares (for the last one, just outside).  `docket` comes from the variants found, `court` from conftest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.guilt import hold
from verify.agenda import agenda
from verify.court import Court, Docket
from verify.discovery import Unloadable

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.hears("accuracy")
@given(data=st.data())
def test_is_within_its_bounds_and_contract(docket: Docket, court: Court, data: st.DataObject) -> None:
    """O and LSE lie within their derived tolerances, empty rows are as promised, nothing else is touched, twice the same."""
    hold(court, docket, data)


@pytest.mark.covers
def test_fills_its_coverage_bins(docket: Docket, court: Court) -> None:
    """Every edge that the support allows is visited, however few random problems there are."""
    for problem in agenda(docket):
        hold(court, docket, problem)


@pytest.mark.hears("counting")
@given(data=st.data())
def test_counts_the_visible_keys(docket: Docket, court: Court, data: st.DataObject) -> None:
    """With Q = 0, O and LSE count keys: every mask, window, length and alignment, exactly."""
    hold(court, docket, data)


@pytest.mark.hears("gather")
@given(data=st.data())
def test_gathers_the_right_row(docket: Docket, court: Court, data: st.DataObject) -> None:
    """With one winning key per row, O is that row of V, bit for bit."""
    hold(court, docket, data)


@pytest.mark.hears("poison")
@given(data=st.data())
def test_ignores_what_is_masked(docket: Docket, court: Court, data: st.DataObject) -> None:
    """NaN or huge values where no query looks change no bit."""
    hold(court, docket, data)


@pytest.mark.hears_family("relations")
@given(data=st.data())
def test_holds_its_relations(dockets: tuple[Docket, ...], court: Court, data: st.DataObject) -> None:
    """Related inputs have related results: one relation a case, bitwise or within the bounds of both results."""
    hold(court, data.draw(st.sampled_from(dockets), label="relation"), data)


@pytest.mark.hears("refusal")
@given(data=st.data())
def test_refuses_what_it_does_not_support(docket: Docket, court: Court, data: st.DataObject) -> None:
    """Just outside its support a kernel raises Unsupported, names the argument, and touches nothing."""
    hold(court, docket, data)


@pytest.mark.hears("gradients")
@given(data=st.data())
def test_gradients_are_within_their_bounds(docket: Docket, court: Court, data: st.DataObject) -> None:
    """dQ, dK and dV, made from what a real forward saved, lie within their derived tolerances; nothing else is touched."""
    hold(court, docket, data)


@pytest.mark.hears("gradient_refusal")
@given(data=st.data())
def test_backward_refuses_what_it_does_not_support(docket: Docket, court: Court, data: st.DataObject) -> None:
    """A backward, too, raises Unsupported just outside its support, names the argument, and touches nothing."""
    hold(court, docket, data)


def test_holds_where_it_was_worst(witness: tuple[Docket, str], court: Court) -> None:
    """Declared worst cases, and cases that failed before."""
    hold(court, *witness)


def test_loads(unloadable: Unloadable) -> None:
    """A kernel file imports and declares something."""
    pytest.fail(f"{unloadable.ref} does not load: {unloadable.message}", pytrace=False)
