"""Worst cases computed again from their ids: what agrees, and that anything else is seen."""

import dataclasses
import math
from dataclasses import asdict

import pytest
import torch

from references.attention import Attention, backward
from references.masks import Causal
from tests.meta.synthetic import evidence, verdict
from verify import recheck
from verify.case import Case
from verify.inputs import dequantised, dout, tensors
from verify.problem import Problem
from verify.report import Report, WorstCase, build, dumps, worst_cases
from verify.tolerance.forward import resolve
from verify.trial import compute_truth
from verify.variant import Config, Numerics

CONFIG = "m64n64"
FORWARD = Problem(batch=2, heads_q=4, heads_kv=2, seqlen_q=9, seqlen_kv=17, head_dim=16, dtype="bfloat16", mask=Causal())
QUANTISED = FORWARD.but(dtype="float8_e4m3fn", dtype_out="bfloat16", descaling="head", mask=Causal("tl"))
BACKWARD = FORWARD.but(dtype="float32", dtype_out="float32", head_dim_v=24, softcap=3.0, seed=7)


def report(problem: Problem, **measures: float) -> Report:
    """A report with that one case; measures: {"dq_reference": 0.5, ...}."""
    found = evidence(0)
    group = "gradients" if {"dq_index", "dk_index", "dv_index"} & measures.keys() else "accuracy"
    named = {f"worst_{what}_{tensor}": value for key, value in measures.items() for tensor, what in [key.split("_")]}
    named |= {f"r_{name.rsplit('_', 1)[1]}": 0.5 for name in named}
    case = Case("triton-fwd", CONFIG, group, problem).id
    one = verdict("triton-fwd", problem.dtype, 0, case=case, config=CONFIG, problem=problem.name, measures=named)
    entries = [dataclasses.replace(e, numerics=asdict(Numerics())) for e in found.variants if e.ref == "triton-fwd"]
    return build(dataclasses.replace(found, verdicts=(one,), variants=tuple(entries), builds=()), ())


def only_worst(known: Report) -> WorstCase:
    ((_, worst),) = worst_cases(known)
    return worst


def truth(problem: Problem):
    arithmetic = resolve(Numerics(), Config.parse(CONFIG), problem, "sm_90")
    return compute_truth(problem, dequantised(problem, tensors(problem)), [arithmetic])


def gradients(problem: Problem):
    """All of dQ, dK and dV at once, by the reference of its own."""
    attention = Attention(problem.mask, problem.scale, problem.softcap)
    return backward(*dequantised(problem, tensors(problem)), dout(problem), attention)


@pytest.mark.parametrize("problem", [FORWARD, QUANTISED], ids=lambda p: p.dtype)
class TestForward:
    def test_agrees(self, problem):
        whole = truth(problem)
        at = int(whole.out.abs().argmax())
        reference, bound = float(whole.out.flatten()[at]), float(whole.out_bound.flatten()[at])
        assert recheck.again(report(problem, out_index=at, out_reference=reference, out_bound=bound)) == (1, ())

    def test_another_reference_or_bound_is_seen(self, problem):
        whole = truth(problem)
        at = int(whole.out.abs().argmax())
        reference, bound = float(whole.out.flatten()[at]), float(whole.out_bound.flatten()[at])
        for changed in ((reference + 1e-6 * bound, bound), (reference, bound * (1 + 1e-6)), (math.nan, bound)):
            measures = dict(zip(("out_reference", "out_bound"), changed, strict=True))
            count, (text,) = recheck.again(report(problem, out_index=at, **measures))
            assert count == 1
            assert repr(reference if changed[0] != reference else bound) in text
            assert f"element {at}" in text

    def test_the_lse_too(self, problem):
        whole = truth(problem)
        at = int(whole.lse.abs().nan_to_num(posinf=0.0).argmax())
        reference, bound = float(whole.lse.flatten()[at]), float(whole.lse_bound.flatten()[at])
        assert recheck.again(report(problem, lse_index=at, lse_reference=reference, lse_bound=bound)) == (1, ())
        assert len(recheck.again(report(problem, lse_index=at, lse_reference=-reference, lse_bound=bound))[1]) == 1


class TestGradients:
    @pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
    @pytest.mark.parametrize("where", [0.0, 0.37, 0.999])
    def test_any_element(self, tensor, where):
        whole = getattr(gradients(BACKWARD), tensor)
        at = int(where * whole.numel())
        known = {f"{tensor}_index": at, f"{tensor}_bound": 1e-6, f"{tensor}_reference": float(whole.flatten()[at])}
        assert recheck.again(report(BACKWARD, **known)) == (1, ())
        known[f"{tensor}_reference"] += 1e-8
        count, (text,) = recheck.again(report(BACKWARD, **known))
        assert count == 1
        assert f"reference of {tensor}, element {at}" in text

    def test_the_bound_is_not_computed_again(self):
        value = float(gradients(BACKWARD).dk.flatten()[5])
        for bound in (1e-3, 1e3, math.inf):
            assert recheck.again(report(BACKWARD, dk_index=5, dk_reference=value, dk_bound=bound))[1] == ()

    def test_all_three_of_one_case(self):
        whole = gradients(BACKWARD)
        known = {f"{name}_index": 3.0 for name in ("dq", "dk", "dv")}
        known |= {f"{name}_reference": float(getattr(whole, name).flatten()[3]) for name in ("dq", "dk", "dv")}
        assert recheck.again(report(BACKWARD, **known)) == (3, ())


class TestMissing:
    def test_no_element(self):
        assert recheck.again(report(FORWARD, out_reference=1.0)) == (0, ())

    def test_no_reference(self):
        assert len(recheck.again(report(BACKWARD, dv_index=0))[1]) == 1

    @pytest.mark.parametrize("tensor", ["out", "dq", "dk", "dv"])
    def test_no_such_element(self, tensor):
        problem = FORWARD if tensor == "out" else BACKWARD
        (text,) = recheck.again(report(problem, **{f"{tensor}_index": 1e6, f"{tensor}_reference": 0.0}))[1]
        assert "1000000" in text

    def test_a_case_that_no_longer_parses(self):
        known = report(FORWARD, out_index=0, out_reference=0.0)
        only_worst(known)["case"] = "triton-fwd:m64n64:accuracy:sq=1,novel=2"
        (text,) = recheck.again(known)[1]
        assert "novel=2" in text

    def test_no_such_tensor(self):
        known = report(BACKWARD, dq_index=0, dq_reference=0.0)
        only_worst(known)["tensor"] = "dbias"
        assert len(recheck.again(known)[1]) == 1

    def test_nan_agrees_with_nan(self):
        problem = BACKWARD.but(distribution="normal", seqlen_q=1, seqlen_kv=0)
        assert float(torch.nan_to_num(gradients(problem).dq).abs().sum()) == 0  # no key: exactly zero
        assert recheck.again(report(problem, dq_index=0, dq_reference=0.0, dq_bound=0.0))[1] == ()
        worst = only_worst(report(problem, dq_index=0, dq_reference=math.nan))
        assert list(recheck._disagreement(worst, "reference", math.nan, math.nan, 0.0)) == []
        assert list(recheck._disagreement(worst, "reference", math.inf, math.inf, 0.0)) == []
        assert len(list(recheck._disagreement(worst, "reference", 1.0, math.nan, 1.0))) == 1
        assert len(list(recheck._disagreement(worst, "reference", math.nan, 1.0, math.inf))) == 1


def test_a_folder_of_reports(tmp_path, monkeypatch):
    (tmp_path / "device").mkdir()
    value = float(gradients(BACKWARD).dq.flatten()[0])
    (tmp_path / "device" / "report.json").write_text(dumps(report(BACKWARD, dq_index=0, dq_reference=value)))
    monkeypatch.setattr(recheck, "roster", lambda: type("Nobody", (), {"declarations": ()}))
    (found,) = recheck.recheck(tmp_path)
    assert (found.cases, found.disagreeing, found.stale) == (1, (), ("triton-fwd",))
