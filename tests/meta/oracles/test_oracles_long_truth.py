"""Long sequences, forward: the chosen positions, and the truth and the bounds there."""

from __future__ import annotations

import pytest
import torch

from references.masks import Causal, Full, Lengths, Mask, Window
from references.score_mods import ScoreMod, Softcap
from tests.harness.fake_trials import trial_of
from tests.harness.long_trials import TALL, WIDE, tried
from verify.judging.selected_positions import COUNT, positions
from verify.judging.trial import Trial
from verify.oracles import gather
from verify.oracles.long import problems as long
from verify.oracles.long.long_whole import gather_long, gathered_truth, lse_range, sharp_rows
from verify.problem import Problem

torch.set_num_threads(1)


def test_chosen_positions() -> None:
    """The ends, what lies beside tiles and powers of two, and some that the seed says."""
    long_rows = Problem(seqlen_q=(1 << 17) + 65, seqlen_kv=40, head_dim=16, dtype="float16")
    found = positions(long_rows, "rows").tolist()
    assert len(found) == len(set(found)) == COUNT
    assert found == sorted(found)
    edges = {
        0,
        1,
        63,
        64,
        65,
        127,
        128,
        32767,
        32768,
        65535,
        65536,
        98303,
        98304,
        131071,
        131072,
        131135,
        131136,
    }
    assert edges <= set(found)
    assert max(found) < long_rows.seqlen_q
    assert found == positions(long_rows, "rows").tolist()
    assert found != positions(long_rows.but(seed=1), "rows").tolist()
    assert positions(long_rows, "keys").tolist() == list(range(40))
    assert len(positions(long_rows.but(seqlen_q=1 << 23), "rows")) == COUNT
    for length in (0, 1, COUNT, COUNT + 1, 300):
        some = positions(long_rows.but(seqlen_q=length), "rows").tolist()
        assert some == sorted(set(some))
        assert len(some) == min(length, COUNT)


@pytest.mark.parametrize(
    "mask", [Full(), Causal(), Window(20, 3), Lengths((150, 90), (120, 0))], ids=lambda m: m.name
)
def test_the_truth_of_chosen_rows_is_that_of_all(mask: Mask) -> None:
    p = Problem(
        batch=2,
        heads_q=4,
        heads_kv=2,
        seqlen_q=150,
        seqlen_kv=120,
        head_dim=16,
        dtype="float16",
        mask=mask,
    )
    trial, rows = trial_of(p), torch.tensor([149, 3, 64, 65, 0])
    some, whole = trial.truth_at(rows), trial.truth
    for name in ("out", "lse", "out_bound", "lse_bound"):
        part, all_rows = getattr(some, name), getattr(whole, name)[:, :, rows]
        # A bound knows the range and the mean of V over the keys that some row of its block sees:
        # fewer rows may see fewer.
        torch.testing.assert_close(
            part, all_rows, rtol=0.15 if name.endswith("bound") else 1e-12, atol=1e-12
        )


@pytest.mark.parametrize("score_mod", [None, Softcap(1.0)], ids=str)
@pytest.mark.parametrize(
    "mask", [Full(), Causal(), Window(20, 3), Lengths((50, 40), (70, 30))], ids=lambda m: m.name
)
def test_no_lse_leaves_its_range(mask: Mask, score_mod: ScoreMod | None) -> None:
    """And where weights are nearly uniform there is hardly any."""
    for scale in (0.25, -1.0, 0.004):
        p = Problem(
            batch=2,
            heads_q=4,
            heads_kv=2,
            seqlen_q=50,
            seqlen_kv=70,
            head_dim=16,
            dtype="float32",
            mask=mask,
        )
        p = p.but(softmax_scale=scale, score_mod=score_mod)
        trial = trial_of(p)
        q, k, _ = trial.expanded
        reached = (
            abs(scale)
            * q.double().norm(dim=-1)
            * k.double().norm(dim=-1).amax(-1).repeat_interleave(2, 1)[..., None]
        )
        low, high = lse_range(trial, reached)
        lse, live = trial.truth.lse, ~trial.truth.empty
        assert bool((low <= lse + 1e-12)[live].all())
        assert bool((high >= lse - 1e-12)[live].all())
        if scale == 0.004:
            assert float((lse - low)[live].max()) < (1e-3 if score_mod is None else 0.2)


def test_what_gather_selects_is_the_truth() -> None:
    p = Problem(
        batch=2,
        heads_q=4,
        heads_kv=2,
        seqlen_q=40,
        seqlen_kv=90,
        head_dim=16,
        dtype="float16",
        mask=Causal("tl"),
    )
    trial = trial_of(p.but(distribution="gather", seqlen_kv=30))
    found, truth = gathered_truth(trial), trial.truth
    torch.testing.assert_close(found.out, truth.out, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.lse, truth.lse, rtol=1e-12, atol=1e-12)
    assert bool((found.lse_bound >= truth.lse_bound).all())


@pytest.mark.first_look(1)
@pytest.mark.parametrize("problem", [WIDE, TALL], ids=["wide", "tall"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_some_rows_have_the_bounds_of_gather_and_no_other_scores_are_computed(
    problem: Problem, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem.but(distribution="gather", dtype=dtype)
    rows, whole = sharp_rows(p), gather._truth(tried(p))
    assert (len(rows) == p.seqlen_q) == (problem is WIDE)
    assert {0, p.seqlen_q - 1} <= set(rows.tolist())
    trial, computed = tried(p), []
    truth_at, truth_of = Trial.truth_at, Trial.truth_of
    monkeypatch.setattr(
        Trial,
        "truth_at",
        lambda self, rows, a: computed.append(len(rows)) or truth_at(self, rows, a),
    )
    monkeypatch.setattr(Trial, "truth_of", lambda *given: computed.append(0) or truth_of(*given))
    assert gather_long(trial).finding is None
    assert computed == [len(rows)]
    known = gather._truth(trial)
    for name in ("out_bound", "lse_bound"):
        torch.testing.assert_close(
            getattr(known, name)[:, :, rows], getattr(whole, name)[:, :, rows], rtol=1e-9, atol=0
        )
    assert bool((known.lse_bound >= whole.lse_bound * (1 - 1e-9)).all())


def test_rows_with_bounds_are_few_where_there_are_many_scores() -> None:
    """Whatever the device is asked, and in the order of the sequence."""
    for p in (
        WIDE.but(seqlen_q=24, seqlen_kv=long.LONG),
        TALL.but(seqlen_q=long.LONG, seqlen_kv=17),
        WIDE.but(heads_q=4, heads_kv=2, seqlen_q=long.LONG, seqlen_kv=long.LONG, mask=Causal()),
    ):
        rows = sharp_rows(p).tolist()
        assert rows == sorted(set(rows))
        assert 2 <= len(rows) <= COUNT
        assert len(rows) * p.heads_q * p.seqlen_kv <= 1 << 21
    short = WIDE.but(seqlen_q=8193, seqlen_kv=5)
    assert sharp_rows(short).tolist() == list(range(8193))
