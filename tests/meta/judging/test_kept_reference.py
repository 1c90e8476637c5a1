"""A case computes its reference once, and what is shared or left out changes no number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness.fake_trials import PLAIN, right_run, trial_of
from tests.harness.ordered_forwards import ordered
from verify.judging import truth
from verify.judging.truth import Truth, compute_truth
from verify.tolerance import forward
from verify.variant import Config

ORDERED = ordered("ascending").numerics
MASKED = PLAIN.but(dtype="float16", seqlen_q=20, seqlen_kv=70, seed=5)


def same(mine: Truth, other: Truth) -> bool:
    names = ("out", "lse", "out_bound", "lse_bound")
    return all(torch.equal(getattr(mine, name), getattr(other, name)) for name in names)


def test_truths_of_one_case_share_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(*args: object, **keywords: object) -> object:
        made.append(args)
        return row_blocks(*args, **keywords)  # type: ignore[arg-type]

    row_blocks = truth.row_blocks
    monkeypatch.setattr(truth, "row_blocks", counted)
    trial = trial_of(MASKED)
    best = forward.resolve(forward.BEST, trial.config, MASKED, trial.arch)
    declared, other = trial.truth, trial.truth_of(best)
    again = trial.truth_under(trial.declaration.numerics, trial.config)
    assert same(other, compute_truth(MASKED, trial.expanded, [best]))
    assert same(declared, compute_truth(MASKED, trial.expanded, [trial.arithmetic]))
    assert same(again, declared)  # nothing of what is kept was overwritten
    assert bool((other.out_bound < declared.out_bound).any())
    blocks = trial.__dict__["_kept"]["cpu"]
    assert len(blocks) == 1
    beside = trial.beside("another seed", MASKED.but(seed=6))
    assert not torch.equal(beside.truth.out, declared.out)
    assert trial.__dict__["_kept"]["cpu"] is blocks


def test_a_large_reference_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "_KEPT", MASKED.pairs - 1)
    trial = trial_of(MASKED)
    assert same(trial.truth_of(trial.arithmetic), trial.truth)
    assert not trial.__dict__["_kept"]


def test_intervals_are_made_where_they_are_judged_and_change_nothing() -> None:
    trial = replace(trial_of(MASKED, numerics=ORDERED), config=Config(block_m=16, block_n=32))
    trial.launches["first"] = right_run(trial)
    assert trial.truth.interval is None
    assert trial.known_truth.interval is not None
    assert same(trial.truth, trial.known_truth)
    fresh = replace(trial, notes={})
    assert fresh.known_truth is fresh.truth  # computed once if the oracle that needs it is first
