"""Chosen rows and keys have the bounds of the whole, whatever a backward declares, and whatever its
forward does."""

from __future__ import annotations

import pytest
import torch

from references import attention
from references.masks import Causal
from references.score_mods import Softcap
from tests.harness.declared import flat_gradients, with_fields
from tests.harness.fake_trials import trial_of
from tests.properties import tier
from verify.judging.selected_positions import Chosen, Given, column_gradients, row_gradients
from verify.judging.trial import Trial
from verify.problem import Problem
from verify.tolerance import backward
from verify.tolerance.backward import GradientTruth
from verify.tolerance.gradients_arithmetic import resolve
from verify.variant import Config, GradientNumerics
from verify.variant.numerics import leaves

torch.set_num_threads(1)

PROBLEM = Problem(
    batch=1,
    heads_q=4,
    heads_kv=2,
    seqlen_q=90,
    seqlen_kv=110,
    head_dim=16,
    dtype="float16",
    mask=Causal(),
    score_mod=Softcap(3.0),
    seed=2,
)
ROWS, KEYS = torch.tensor([89, 0, 40]), torch.tensor([3, 109, 64, 0])

# By field of GradientNumerics: what else than the default may be declared, and what else with it.
ODD: dict[str, dict[str, object]] = {
    "operands": {"operands": "float32"},
    "float32_products": {"float32_products": "tf32", "operands": "float32"},
    "instruction": {"instruction": "fma"},
    "accumulator": {"accumulator": "bfloat16"},
    "score_accumulator": {"score_accumulator": "bfloat16"},
    "exp": {"exp": "__expf"},
    "scale_roundings": {"scale_roundings": 3},
    "softcap_tanh": {"softcap_tanh": "tanh.approx"},
    "prescale": {"prescale": "k"},
    "delta": {"delta": "input"},
    "probability": {"probability": "float32"},
    "score_gradient_dtype": {"score_gradient_dtype": "float32"},
    "score_gradient_of": {"score_gradient_of": "rounded"},
    "score_gradient_scaled": {"score_gradient_scaled": True},
    "block_m": {"block_m": 1},
    "block_n": {"block_n": 1},
    "group": {"group": "cast"},
    "atomics": {"atomics": ("dq", "dk", "dv"), "atomics_dtype": "input"},
    "atomics_dtype": {"atomics": ("dq",), "atomics_dtype": "input"},
    "sums_roundings": {"sums_roundings": 9},
    "order_head_dim": {"order_head_dim": "ascending"},
    "order_keys": {"order_keys": "ascending", "block_n": 0},
    "order_rows": {"order_rows": "whole_first", "block_m": 0},
}


def both(problem: Problem, numerics: GradientNumerics) -> tuple[GradientTruth, tuple[Chosen, ...]]:
    """The bounds of everything, and those of the chosen, where the forward saved exact results."""
    trial: Trial = trial_of(problem)
    q, k, v = trial.expanded
    exact = attention.forward(
        q, k, v, attention.Attention(problem.mask, problem.scale, problem.score_mod)
    )
    given = Given(q, k, v, trial.dout, exact.out, exact.lse)
    a = resolve(numerics, Config(block_m=32, block_n=32), problem, "sm_90")
    whole = backward.gradient_truth(problem, q, k, v, trial.dout, exact.out, exact.lse, a)
    return whole, (
        row_gradients(problem, given, a, ROWS),
        *column_gradients(problem, given, a, KEYS),
    )


@pytest.mark.parametrize("name", tier.for_ci(ODD, keep=4))
def test_what_is_declared_moves_the_chosen_bounds_as_the_whole_ones(name: str) -> None:
    plain, _ = both(PROBLEM, GradientNumerics())
    whole, found = both(PROBLEM, with_fields(GradientNumerics(), **ODD[name]))
    moved = False
    for chosen in found:
        bound = getattr(whole, f"{chosen.name}_bound")
        torch.testing.assert_close(chosen.bound, bound[:, :, chosen.at], rtol=1e-5, atol=1e-12)
        moved |= not torch.equal(bound, getattr(plain, f"{chosen.name}_bound"))
    assert moved, f"{name} changes no bound: the comparison shows nothing"


WHOLE_ROWS = {"softmax_source": "own", "delta_of": "weights"}  # what sums over all keys of a row


def test_every_field_that_may_be_declared_is_tried_above() -> None:
    plain = leaves(GradientNumerics())
    tried = [*ODD.values(), *({name: value} for name, value in WHOLE_ROWS.items())]
    declared = [leaves(flat_gradients(**fields)) for fields in tried]
    assert {path for one in declared for path in plain if one[path] != plain[path]} == {*plain}


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_sums_over_whole_rows_are_not_known_where_keys_are_chosen(name: str) -> None:
    """`long_columns` leaves such kernels alone; no other oracle may ask."""
    with pytest.raises(ValueError, match="one of whole rows, which are not given"):
        both(PROBLEM, flat_gradients(**{name: WHOLE_ROWS[name]}))


@pytest.mark.parametrize(("scale", "large"), [(20.0, False), (20000.0, True)])
def test_a_prescaled_key_that_may_overflow_leaves_nothing_to_ask(scale: float, large: bool) -> None:
    problem = PROBLEM.but(score_mod=None, softmax_scale=scale)
    whole, found = both(problem, flat_gradients(prescale="k"))
    for chosen in found:
        assert bool(chosen.bound.isinf().all()) is large
        assert bool(getattr(whole, f"{chosen.name}_bound").isinf().all()) is large
