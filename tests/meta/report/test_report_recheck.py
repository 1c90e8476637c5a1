"""Worst cases computed again from their ids: what agrees, and that anything else is seen."""

import math
import sys
from typing import Any

import pytest
import torch

from references.attention import backward
from references.masks import Causal
from references.quantisation import ByHead
from references.score_mods import Softcap
from tests.harness.one_case_reports import CONFIG, report
from verify import cli
from verify.campaign import recheck
from verify.judging.truth import compute_truth
from verify.problem import Problem
from verify.problem.inputs import dequantised, dout, tensors
from verify.report import (
    Report,
    ReportError,
    WorstCase,
    dumps,
    parse,
    reports_in,
    worst_cases,
)
from verify.tolerance.forward import resolve
from verify.variant import Config, Numerics

FORWARD = Problem(
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=9,
    seqlen_kv=17,
    head_dim=16,
    dtype="bfloat16",
    mask=Causal(),
)
QUANTISED = FORWARD.but(
    dtype="float8_e4m3fn", dtype_out="bfloat16", quantisation=ByHead(), mask=Causal("tl")
)
BACKWARD = FORWARD.but(
    dtype="float32", dtype_out="float32", head_dim_v=24, score_mod=Softcap(3.0), seed=7
)


def only_worst(known: Report) -> WorstCase:
    ((_, worst),) = worst_cases(known)
    return worst


def truth(problem: Problem):
    arithmetic = resolve(Numerics(), Config.parse(CONFIG), problem, "sm_90")
    return compute_truth(problem, dequantised(problem, tensors(problem)), [arithmetic])


def gradients(problem: Problem):
    """All of dQ, dK and dV at once, by the reference of its own."""
    attention = problem.attention
    return backward(*dequantised(problem, tensors(problem)), dout(problem), attention)


@pytest.mark.parametrize("problem", [FORWARD, QUANTISED], ids=lambda p: p.dtype)
class TestForward:
    def test_agrees(self, problem):
        whole = truth(problem)
        at = int(whole.out.abs().argmax())
        reference, bound = float(whole.out.flatten()[at]), float(whole.out_bound.flatten()[at])
        assert recheck.recheck_report(
            report(problem, out_index=at, out_reference=reference, out_bound=bound)
        ) == (1, ())

    def test_another_reference_or_bound_is_seen(self, problem):
        whole = truth(problem)
        at = int(whole.out.abs().argmax())
        reference, bound = float(whole.out.flatten()[at]), float(whole.out_bound.flatten()[at])
        for changed in (
            (reference + 1e-6 * bound, bound),
            (reference, bound * (1 + 1e-6)),
            (math.nan, bound),
        ):
            measures = dict(zip(("out_reference", "out_bound"), changed, strict=True))
            count, (text,) = recheck.recheck_report(report(problem, out_index=at, **measures))
            assert count == 1
            assert repr(reference if changed[0] != reference else bound) in text
            assert f"element {at}" in text

    def test_of_another_model_the_error_must_be_within_the_bound(self, problem):
        """r is 0.5: of a bound twice as wide, and a bit more, it is an error that is too large."""
        whole = truth(problem)
        at = int(whole.out.abs().argmax())
        reference, bound = float(whole.out.flatten()[at]), float(whole.out_bound.flatten()[at])
        for factor, many in ((0.5, 0), (1.99, 0), (2.01, 1)):
            known = report(problem, out_index=at, out_reference=reference, out_bound=factor * bound)
            assert recheck.recheck_report(known)[1], "of today's model it is another bound"
            known["versions"]["bounds"] = "1"
            assert len(recheck.recheck_report(known)[1]) == many
            del known["versions"]["bounds"]
            said = recheck.recheck_report(known)[1]
            assert len(said) == many
            assert not many or "today's bound is" in said[0]
        known = report(problem, out_index=at, out_reference=reference + bound, out_bound=bound)
        known["versions"]["bounds"] = "1"
        assert len(recheck.recheck_report(known)[1]) == 1, "the reference is the same in all models"

    def test_the_lse_too(self, problem):
        whole = truth(problem)
        at = int(whole.lse.abs().nan_to_num(posinf=0.0).argmax())
        reference, bound = float(whole.lse.flatten()[at]), float(whole.lse_bound.flatten()[at])
        assert recheck.recheck_report(
            report(problem, lse_index=at, lse_reference=reference, lse_bound=bound)
        ) == (1, ())
        assert (
            len(
                recheck.recheck_report(
                    report(problem, lse_index=at, lse_reference=-reference, lse_bound=bound)
                )[1]
            )
            == 1
        )


class TestGradients:
    @pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
    @pytest.mark.parametrize("where", [0.0, 0.37, 0.999])
    def test_any_element(self, tensor, where):
        whole = getattr(gradients(BACKWARD), tensor)
        at = int(where * whole.numel())
        known = {
            f"{tensor}_index": at,
            f"{tensor}_bound": 1e-6,
            f"{tensor}_reference": float(whole.flatten()[at]),
        }
        assert recheck.recheck_report(report(BACKWARD, **known)) == (1, ())
        known[f"{tensor}_reference"] += 1e-8
        count, (text,) = recheck.recheck_report(report(BACKWARD, **known))
        assert count == 1
        assert f"reference of {tensor}, element {at}" in text

    def test_the_bound_is_not_computed_again(self):
        value = float(gradients(BACKWARD).dk.flatten()[5])
        for bound in (1e-3, 1e3, math.inf):
            assert (
                recheck.recheck_report(
                    report(BACKWARD, dk_index=5, dk_reference=value, dk_bound=bound)
                )[1]
                == ()
            )

    def test_all_three_of_one_case(self):
        whole = gradients(BACKWARD)
        known = {f"{name}_index": 3.0 for name in ("dq", "dk", "dv")}
        known |= {
            f"{name}_reference": float(getattr(whole, name).flatten()[3])
            for name in ("dq", "dk", "dv")
        }
        assert recheck.recheck_report(report(BACKWARD, **known)) == (3, ())


class TestMissing:
    def test_no_element(self):
        assert recheck.recheck_report(report(FORWARD, out_reference=1.0)) == (0, ())

    def test_no_reference(self):
        assert len(recheck.recheck_report(report(BACKWARD, dv_index=0))[1]) == 1

    @pytest.mark.parametrize("tensor", ["out", "dq", "dk", "dv"])
    def test_no_such_element(self, tensor):
        problem = FORWARD if tensor == "out" else BACKWARD
        (text,) = recheck.recheck_report(
            report(problem, **{f"{tensor}_index": 1e6, f"{tensor}_reference": 0.0})
        )[1]
        assert "1000000" in text

    def test_a_case_that_no_longer_parses(self):
        known = report(FORWARD, out_index=0, out_reference=0.0)
        only_worst(known)["case"] = "triton-fwd:m64n64:accuracy:sq=1,novel=2"
        (text,) = recheck.recheck_report(known)[1]
        assert "novel=2" in text

    def test_no_such_tensor(self):
        known = report(BACKWARD, dq_index=0, dq_reference=0.0)
        only_worst(known)["tensor"] = "dbias"
        assert len(recheck.recheck_report(known)[1]) == 1

    def test_nan_agrees_with_nan(self):
        problem = BACKWARD.but(distribution="normal", seqlen_q=1, seqlen_kv=0)
        # no key: exactly zero
        assert float(torch.nan_to_num(gradients(problem).dq).abs().sum()) == 0
        assert (
            recheck.recheck_report(report(problem, dq_index=0, dq_reference=0.0, dq_bound=0.0))[1]
            == ()
        )
        worst = only_worst(report(problem, dq_index=0, dq_reference=math.nan))
        assert list(recheck._disagreement(worst, "reference", math.nan, math.nan, 0.0)) == []
        assert list(recheck._disagreement(worst, "reference", math.inf, math.inf, 0.0)) == []
        assert len(list(recheck._disagreement(worst, "reference", 1.0, math.nan, 1.0))) == 1
        assert len(list(recheck._disagreement(worst, "reference", math.nan, 1.0, math.inf))) == 1


def test_a_folder_of_reports(tmp_path, monkeypatch):
    (tmp_path / "device").mkdir()
    value = float(gradients(BACKWARD).dq.flatten()[0])
    (tmp_path / "device" / "report.json").write_text(
        dumps(report(BACKWARD, dq_index=0, dq_reference=value))
    )
    monkeypatch.setattr(recheck, "roster", lambda: type("Nobody", (), {"declarations": ()}))
    (found,) = recheck.recheck(reports_in(tmp_path))
    assert (found.cases, found.disagreeing, found.stale) == (1, (), ("triton-fwd",))
    assert recheck.recheck(reports_in(tmp_path / "device")) == [found]


class TestWhatIsNoReport:
    """One line each, for the person who typed it."""

    @pytest.mark.parametrize("name", ["nope", "empty"])
    def test_a_folder_without_reports_is_a_usage_error(self, tmp_path, name, monkeypatch, capsys):
        (tmp_path / "empty").mkdir()
        monkeypatch.setattr(sys, "argv", ["verify", "recheck", str(tmp_path / name)])
        assert cli.main() == cli.USAGE
        said = " ".join(capsys.readouterr().out.split())
        assert said.endswith("does not exist." if name == "nope" else "holds no report")

    @pytest.mark.parametrize(
        "text",
        [
            "[" * 200000,
            '{"schema":' + '{"a":' * 900 + "1" + "}" * 901,
            "null",
            "[2]",
            '{"schema": 2}',
            "\ud800",
            "1e999",
        ],
    )
    def test_what_does_not_read_is_one_line(self, tmp_path, text):
        (tmp_path / "device").mkdir()
        (tmp_path / "device" / "report.json").write_text(text, errors="surrogatepass")
        with pytest.raises(ReportError) as caught:
            reports_in(tmp_path)
        assert str(caught.value).count("\n") == 0
        assert str(caught.value).startswith(f"{tmp_path / 'device' / 'report.json'}: ")

    def test_support_nested_too_deeply(self):
        deep: Any = []
        for _ in range(3000):
            deep = [deep]
        known = report(FORWARD, out_index=0)
        known["variants"][0]["support"] = {"dtypes": deep}
        with pytest.raises(ReportError, match="nested too deeply"):
            parse(known)

    @pytest.mark.parametrize(
        "numerics",
        [
            {"exp": 7},
            {"exp": "banana"},
            {"no_such_field": 1},
            {"block_n": "many"},
            {"scale_roundings": math.nan},
            {"exp": None},
        ],
    )
    def test_declarations_of_wrong_types_disagree(self, numerics):
        known = report(FORWARD, out_index=0, out_reference=1.0, out_bound=1.0)
        known["variants"][0]["numerics"] |= numerics
        count, (said,) = recheck.recheck_report(known)
        assert count == 1
        assert "\n" not in said

    @pytest.mark.parametrize(
        "case",
        [
            "",
            "a:b",
            "a:m64n64:accuracy:sq=9999999999,skv=9999999999,d=64,dtype=float16",
            "a:m64n64:accuracy:sq=1,skv=1,d=64,dtype=float99",
            "a:m64n64:accuracy:sq=2,skv=2,d=64,dtype=float16,mask=lengths.9999999999",
            "a:m64n64:accuracy:{9999999999}",
            "a:m64n64:accuracy:sq=99999999999,skv=0,d=64,dtype=float16",
        ],
    )
    def test_cases_that_cannot_be_judged_disagree(self, case):
        known = report(FORWARD, out_index=0, out_reference=1.0, out_bound=1.0)
        only_worst(known)["case"] = case
        count, (said,) = recheck.recheck_report(known)
        assert count == 1
        assert "\n" not in said
