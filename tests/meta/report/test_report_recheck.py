"""Worst cases computed again from their ids: what agrees, and that anything else is seen."""

import dataclasses
import json
import math
import re
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from references.attention import backward
from references.masks import Causal
from references.quantisation import ByHead
from references.score_mods import Softcap
from tests.harness.fake_campaign import BINS, evidence, verdict
from tests.meta.probes.test_probes_report import REPORT
from tests.meta.report.test_report_beside import account
from verify import cli
from verify.campaign import recheck
from verify.evidence.strict_json import loads
from verify.judging.truth import compute_truth
from verify.probes.report import as_data
from verify.problem import Problem
from verify.problem.case import Case
from verify.problem.inputs import dequantised, dout, tensors
from verify.report import (
    Report,
    ReportError,
    WorstCase,
    build,
    dumps,
    parse,
    plots,
    read,
    svg,
    worst_cases,
    write,
)
from verify.report.pages import disagreements
from verify.tolerance.forward import resolve
from verify.variant import Config, Numerics

CONFIG = "m64n64"
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


def report(problem: Problem, **measures: float) -> Report:
    """A report with that one case; measures: {"dq_reference": 0.5, ...}."""
    found = evidence(0)
    group = "gradients" if {"dq_index", "dk_index", "dv_index"} & measures.keys() else "accuracy"
    named = {
        f"worst_{what}_{tensor}": value
        for key, value in measures.items()
        for tensor, what in [key.split("_")]
    }
    named |= {f"r_{name.rsplit('_', 1)[1]}": 0.5 for name in named}
    case = Case("triton-fwd", CONFIG, group, problem).id
    one = verdict(
        "triton-fwd",
        problem.dtype,
        0,
        case=case,
        config=CONFIG,
        problem=problem.name,
        measures=named,
    )
    entries = [
        dataclasses.replace(e, numerics=asdict(Numerics()))
        for e in found.variants
        if e.ref == "triton-fwd"
    ]
    return build(
        dataclasses.replace(found, verdicts=(one,), variants=tuple(entries), builds=()), ()
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
    (found,) = recheck.recheck(tmp_path)
    assert (found.cases, found.disagreeing, found.stale) == (1, (), ("triton-fwd",))
    assert recheck.recheck(tmp_path / "device") == [found]


class TestWhatIsNoReport:
    """One line each, for whoever typed it."""

    @pytest.mark.parametrize("name", ["nope", "empty"])
    def test_a_folder_without_reports_is_a_usage_error(self, tmp_path, name, monkeypatch, capsys):
        (tmp_path / "empty").mkdir()
        monkeypatch.setattr(sys, "argv", ["verify", "recheck", str(tmp_path / name)])
        assert cli.main() == cli.USAGE
        said = " ".join(capsys.readouterr().out.split())
        assert said.endswith("there is no such folder" if name == "nope" else "holds no report")

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
            recheck.recheck(tmp_path)
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


@pytest.fixture(scope="module")
def green():
    """A report in which nothing is wrong, and its plot, which takes most of the time."""
    found = evidence(24)
    mine = {"variants": tuple(e for e in found.variants if e.ref == "torch-flash")}
    mine |= {"verdicts": tuple(v for v in found.verdicts if v.variant == "torch-flash")}
    known = build(dataclasses.replace(found, **mine, lost=(), not_run=(), builds=()), BINS)
    return known, plots.ratio_plot(known)


class TestPages:
    """Files of a report's folder that contradict each other."""

    @pytest.fixture
    def folder(self, green, tmp_path, monkeypatch):
        """The folder of that report."""
        known, picture = green
        monkeypatch.setattr(plots, "ratio_plot", lambda report: picture)
        monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)
        write(known, tmp_path)
        assert disagreements(read(tmp_path), tmp_path) == []
        return tmp_path

    def test_a_plot_is_known_by_its_data(self, green):
        known, picture = green
        again = plots.ratio_plot(parse(loads(dumps(known))))
        assert svg.without_pictures(picture) == svg.without_pictures(again)
        worse = plots.ratio_plot(build(evidence(24, worse=1.5), BINS))
        assert svg.without_pictures(picture) != svg.without_pictures(worse)
        assert "<path" not in svg.without_pictures(picture)

    def test_what_came_to_lie_beside_it_is_missed(self, folder):
        (folder / "sanitizer.json").write_text(json.dumps(account()))
        said = disagreements(read(folder), folder)
        assert said[0].startswith(
            "report.json: says nothing of sanitizer.json, but the file beside it makes green, '0"
            " records"
        )
        assert [line.split(",")[0] for line in said[1:]] == ["report.md", "report.html"]
        assert "make '✅ **pass** Sanitizers: 0 records" in said[1]
        write(read(folder), folder)
        assert disagreements(read(folder), folder) == []

    def test_the_pages_of_what_lies_beside_it_are_held_too(self, folder):
        (folder / "sanitizer.json").write_text(json.dumps(account()))
        probes = replace(REPORT, device=read(folder)["device"])
        (folder / "probes.json").write_text(dumps(as_data(probes)))
        write(read(folder), folder)
        assert disagreements(read(folder), folder) == []
        for name, old in (("probes.md", "agrees"), ("sanitizer.md", "2025.3")):
            page = (folder / name).read_text()
            assert old in page
            (folder / name).write_text(page.replace(old, "as you like"))
        said = disagreements(read(folder), folder)
        assert [line.split(",")[0] for line in said] == ["probes.md", "sanitizer.md"]
        (folder / "probes.md").unlink()
        write(read(folder), folder)
        assert disagreements(read(folder), folder) == []

    @pytest.mark.parametrize("name", ["report.md", "report.html", "r.svg"])
    def test_a_page_that_was_changed(self, folder, name):
        page = (folder / name).read_text()
        (folder / name).write_text(page.replace("torch-flash", "torch-flush", 1))
        (said,) = disagreements(read(folder), folder)
        assert said.startswith(f"{name}, line ")
        assert "torch-flush" in said or "svg" in said
        (folder / name).unlink()
        assert disagreements(read(folder), folder) == []

    def test_numbers_that_were_changed(self, folder):
        known = read(folder)
        known["variants"][0]["dtypes"][0]["cases"] += 1
        (folder / "report.json").write_text(dumps(known))
        said = disagreements(read(folder), folder)
        assert said[0].startswith("report.json: torch-flash: ")
        assert {line.split(",")[0] for line in said[1:]} == {"report.md", "report.html"}

    def test_a_status_that_hides_a_failure(self, folder):
        known = read(folder)
        known["variants"][0]["dtypes"][0]["tensors"]["out"]["worst"]["r"] = 4.8e4
        (folder / "report.json").write_text(dumps(known))
        assert (
            "torch-flash, float16 is green, but the worst r of out is 48,000"
            in disagreements(read(folder), folder)[0]
        )

    def test_how_a_machine_draws_does_not_count(self, folder):
        page = (folder / "r.svg").read_text()
        body = re.search(r"<svg [^>]*>(.*)</svg>", page, re.DOTALL)[1]
        other = body.replace("\n", "\n ", 1)
        (folder / "r.svg").write_text(page.replace(body, other))
        assert disagreements(read(folder), folder)  # changed since it was drawn
        (folder / "r.svg").write_text(
            page.replace(body, other).replace(svg._digest(body), svg._digest(other))
        )
        assert disagreements(read(folder), folder) == []

    def test_colours_do_not_count(self, folder):
        page = (folder / "report.html").read_text()
        (folder / "report.html").write_text(page.replace("--warn: ", "--other: "))
        assert disagreements(read(folder), folder) == []

    def test_the_command_says_so(self, folder, monkeypatch):
        monkeypatch.setattr(recheck, "roster", lambda: type("Nobody", (), {"declarations": ()}))
        monkeypatch.setattr(recheck, "recheck_report", lambda report: (0, ()))
        assert (
            CliRunner()
            .invoke(cli.app, ["recheck", str(folder)], standalone_mode=False)
            .return_value
            == 0
        )
        (folder / "report.md").write_text("# All is well\n")
        done = CliRunner().invoke(cli.app, ["recheck", str(folder)], standalone_mode=False)
        assert done.return_value == 1
        assert "report.md, line 1: has '# All is well'" in done.output
        assert "verify report --render" in done.output
