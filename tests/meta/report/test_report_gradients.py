"""Reports of more than O and LSE: the data of gradients, their pages, and their worst cases."""

import dataclasses
import math

import pytest

from tests.harness.fake_campaign import ARCHES, BINS, built, evidence, gradient_verdict, of, verdict
from tests.harness.rendered import as_html, as_markdown, table
from tests.meta.report.test_report_rendering import Elements
from verify.evidence import NotRun
from verify.evidence.strict_json import loads
from verify.problem import Problem
from verify.report import Report, build, dumps, parse, tables, worst_cases
from verify.report.schema import TENSORS
from verify.report.sections import builds, closest, declared, variants


@pytest.fixture(scope="module")
def report() -> Report:
    return build(evidence(), BINS)


class TestTensors:
    def test_a_backward_has_gradients_and_no_output(self, report):
        d = of(report, "triton-backward")["dtypes"][0]
        assert list(d["tensors"]) == list(d["samples"]) == ["dq", "dk", "dv"]
        assert [list(o.get("r", {})) for o in d["oracles"]] == [["dq", "dk", "dv"]]
        assert (d["lse_ulp"], d["bound_ratio"]) == (None, None)
        assert d["tensors"]["dk"]["r"]["count"] == 60

    def test_a_forward_has_no_gradients(self, report):
        d = of(report, "triton-fwd")["dtypes"][0]
        assert (list(d["tensors"]), list(d["samples"])) == (["out", "lse"], ["out"])
        assert {o["oracle"]: list(o.get("r", {})) for o in d["oracles"]} == {
            "forward": ["out", "lse"],
            "gather": ["out"],
            "counting": [],
        }

    def test_a_variant_with_both(self):
        found = evidence()
        more = [gradient_verdict("triton-fwd", "float16", i) for i in range(9)]
        both = build(dataclasses.replace(found, verdicts=(*found.verdicts, *more)), BINS)
        d = of(both, "triton-fwd")["dtypes"][0]
        assert tuple(d["tensors"]) == TENSORS
        assert [o["r"].keys() for o in d["oracles"] if o["oracle"] == "gradient_bound"] == [
            {"dq", "dk", "dv"}
        ]

    def test_the_worst_case_carries_its_element(self, report):
        d = of(report, "triton-backward")["dtypes"][0]
        found = [
            v for v in evidence().verdicts if (v.variant, v.dtype) == ("triton-backward", "float16")
        ]
        top = max(found, key=lambda v: v.measures["r_dk"])
        worst = d["tensors"]["dk"]["worst"]
        assert worst == {
            "tensor": "dk",
            "r": top.measures["r_dk"],
            "case": top.case,
            "config": top.config,
            "oracle": "gradient_bound",
            "index": int(top.measures["worst_index_dk"]),
            "reference": 0.25,
            "bound": top.measures["worst_bound_dk"],
        }
        assert d["tensors"]["dq"]["worst"]["r"] == max(v.measures["r_dq"] for v in found)

    def test_an_element_may_be_unknown(self, report):
        worst = of(report, "triton-fwd")["dtypes"][0]["tensors"]["lse"]["worst"]
        assert (worst["index"], worst["reference"], worst["bound"]) == (None, None, None)

    def test_worst_cases_of_every_tensor(self, report):
        found = {(v["ref"], w["tensor"]) for v, w in worst_cases(report)}
        both = {
            (ref, t)
            for ref in ("torch-flash", "triton-fwd", "triton-tutorial", "ptx-mma")
            for t in ("out", "lse")
        }
        assert found == both | {("triton-fp8-forward", t) for t in ("out", "lse")} | {
            ("triton-backward", t) for t in ("dq", "dk", "dv")
        }

    def test_one_run_that_is_worst_in_two_tensors_is_named_once(self, report):
        d = of(report, "triton-backward")["dtypes"][0]
        one = d["tensors"]["dk"]["worst"]
        d = d | {
            "tensors": {
                n: {"r": t["r"], "worst": one | {"tensor": n}} for n, t in d["tensors"].items()
            }
        }
        ((title, worst),) = variants.worst_of(d)
        assert title.startswith("Worst dQ, r = ")
        assert title.count(" and worst d") == 2
        assert worst["case"] == one["case"]

    def test_written_and_read_back(self, report):
        text = dumps(report)
        assert parse(loads(text)) == parse(loads(dumps(parse(loads(text)))))
        assert of(parse(loads(text)), "triton-backward")["gradients"] == {
            "softmax": {"probability": "input"}
        }
        assert of(parse(loads(text)), "triton-backward")["entries"] == ["backward"]


class TestPages:
    def test_markdown_verdicts(self, report):
        columns, _, *rows = table(as_markdown(report), "## Verdicts")
        assert columns[4:9] == [f"r of {name}" for name in ("O", "LSE", "dQ", "dK", "dV")]
        named = dict(zip((row[0] for row in rows), rows, strict=True))
        assert named["**triton-backward**"][4:6] == ["–", "–"]
        assert "–" not in named["**triton-backward**"][6:9]
        assert named["**triton-fwd**"][6:9] == ["–"] * 3
        assert named["**triton-fp8-forward**"][1] == "float8_e4m3fn"
        reasons = "6 of 8 coverage bins empty; 1 case launched but never judged"
        assert [row[2] for row in rows if row[0] == "**ptx-mma**" and not row[1]] == [
            f"⬜ **incomplete**: {reasons}"
        ]
        assert reasons in as_html(report)
        assert [row[2] for row in rows if row[1] == "builds"] == [
            "❌ **FAIL**: **1 of 3 builds fail**"
        ]

    def test_a_forward_only_report_has_no_columns_of_gradients(self):
        found = evidence()
        kept = tuple(v for v in found.verdicts if v.variant != "triton-backward")
        page = as_markdown(build(dataclasses.replace(found, verdicts=kept), BINS))
        assert table(page, "## Verdicts")[0][4:6] == ["r of O", "r of LSE"]
        assert "dQ" not in page

    def test_details_of_a_backward(self, report):
        page = as_markdown(report)
        part = page.split("<summary>triton-backward ", 1)[1].split("</details>", 1)[0]
        assert "| not applicable | r of dQ | r of dK | r of dV |" in part
        assert "r of O" not in part
        assert "LSE" not in part

    def test_markdown_builds(self, report):
        columns, _, *rows = table(as_markdown(report), "## Builds")
        assert columns == list(builds.COLUMNS)
        assert [row[1] for row in rows if row[0] == "**triton-fwd**"] == list(ARCHES)
        spilled = [row for row in rows if row[8] != "–"]
        assert [row[7:] for row in spilled] == [
            ["2", "8 + 16", "24", "`m128n64-float16-d256`"],
            ["1", "96 + 128", "224", "`m128n64-float16-d256`"],
        ]
        assert [row[2] for row in rows].count("1 of 2") == 2

    def test_what_does_not_compile_is_shown_with_the_compilers_words(self, report):
        for page in (as_markdown(report), as_html(report)):
            assert "mma is not defined" in page
            assert "failing builds: " in page
            assert "19 builds compiled, 1 failing." in page

    def test_nothing_compiled_and_why(self, report):
        none = build(dataclasses.replace(evidence(), builds=(), verdicts=()), BINS)
        for render in (as_markdown, as_html):
            assert "Nothing was compiled in this run" in render(none)
            assert "builds compiled" not in render(none)
        said = builds.not_built(
            build(dataclasses.replace(evidence(), builds=(built("triton-fwd", "sm_80"),)), BINS)
        )
        assert "gluon-hopper (needs compute capability 9.0)" in said
        assert "triton-fwd," not in said
        assert (
            builds.not_built(report) == "No build is on record of torch-flash, triton-fp8-forward."
        )

    def test_declarations(self, report):
        found = {one.title: one for one in declared.declarations(report)}
        assert [ref for ref, _ in found["Declared numerics of gradients"].rows] == [
            "triton-backward"
        ]
        assert found["Declared numerics of gradients"].whose == "triton-backward"
        assert "triton-backward" not in dict(found["Declared numerics"].rows)
        assert "triton-backward" in dict(found["Declared contract"].rows)

    def test_what_all_declare_alike_is_said_once(self, report):
        changed = [
            v | {"contract": v["contract"] | {"lse": "base 2"}} if v["ref"] == "ptx-mma" else v
            for v in report["variants"]
        ]
        one, *_ = declared.declarations(report | {"variants": changed})
        assert one.terms == ["lse"]
        assert dict(one.rows) == {
            v["ref"]: ["base 2" if v["ref"] == "ptx-mma" else "natural"] for v in changed
        }
        assert ("deterministic", "yes") in one.alike
        assert one.whose == "All alike"
        for page in (as_markdown(report), as_html(report)):
            assert "All alike" in page

    def test_html_has_the_builds(self, report):
        page = as_html(report)
        heading = page.index('<h2 id="builds">')
        part = page[heading : page.index('<h2 id="variants">')]
        assert part.count("<td>sm_90a<td") == 3
        assert "96 + 128" in part
        assert not [a for _, a in Elements(page).tags if a.get("src")]

    def test_not_run_rows_span_the_table(self, report):
        page = as_html(report)
        rows = page[page.index('<h2 id="verdicts">') : page.index("</table>")]
        tags = Elements(rows).tags
        columns = sum(tag == "th" for tag, _ in tags)
        spans = {int(a["colspan"]) for _, a in tags if "colspan" in a}
        assert spans == {columns - 2}  # after variant and dtype


class TestOracles:
    def test_mere_counts_of_several_groups_are_one_row(self):
        made = [
            verdict(
                "triton-fwd",
                "float16",
                3 * i + 1,
                oracle="memory",
                group=group,
                outcome=outcome,
                measures={},
            )
            for i, (group, outcome) in enumerate(
                [("exact", "pass"), ("bound", "pass"), ("bound", "inapplicable"), ("held", "fail")]
            )
        ]
        made += [
            verdict("triton-fwd", "float16", 0),
            verdict("triton-fwd", "float16", 40, oracle="gather", measures={}),
        ]
        d = of(build(dataclasses.replace(evidence(), verdicts=tuple(made)), BINS), "triton-fwd")[
            "dtypes"
        ][0]
        rows = [
            (o["oracle"], o["group"], o["cases"], o["failures"], o["inapplicable"])
            for o in variants.oracles_of(d)
        ]
        assert rows == [
            ("memory", "held", 1, 1, 0),
            ("forward", "bound", 1, 0, 0),
            ("gather", "exact", 1, 0, 0),
            ("memory", "2 groups", 2, 0, 1),
        ]


class TestWorstCases:
    def test_the_largest_r_of_every_variant(self, report):
        found = {one.ref: one for one in closest.closest(report)}
        assert list(found) == [
            v["ref"] for v in tables.ordered(report) if any(d["tensors"] for d in v["dtypes"])
        ]
        worst = max(
            t["worst"]["r"]
            for d in of(report, "triton-backward")["dtypes"]
            for t in d["tensors"].values()
        )
        assert found["triton-backward"].case["r"] == worst
        assert math.isnan(found["triton-tutorial"].case["r"])  # of the LSE, beside an r of 7.1

    @pytest.mark.parametrize(
        ("tensor", "index", "where"),
        [
            ("out", 2 * 65 * 64 + 64 + 3, "O[0, 2, 1, 3]"),
            ("lse", 2 * 65 + 64, "LSE[0, 2, 64]"),
            ("dk", 333 * 32 + 33, "dK[0, 1, 1, 1]"),
            ("dq", 10**9, "dQ"),
            ("out", None, "O"),
        ],
    )
    def test_where_the_worst_element_is(self, tensor, index, where):
        problem = Problem(
            heads_q=4,
            heads_kv=2,
            seqlen_q=65,
            seqlen_kv=333,
            head_dim=32,
            head_dim_v=64,
            dtype="float16",
        )
        measures = {f"r_{tensor}": 0.5} | (
            {} if index is None else {f"worst_index_{tensor}": float(index)}
        )
        made = verdict("triton-fwd", "float16", 0, problem=problem.name, measures=measures)
        found = build(dataclasses.replace(evidence(), verdicts=(made,)), BINS)
        assert [one.where for one in closest.closest(found)] == [where]
        assert f"<td>{where}<td" in as_html(found)


def test_a_reason_that_all_dtypes_share_is_said_once():
    found = evidence()
    kept = tuple(v for v in found.verdicts if v.variant != "torch-flash")
    left = (*found.not_run, NotRun(variant="torch-flash", reason="no device"))
    report = build(dataclasses.replace(found, verdicts=kept, not_run=left), BINS)
    assert of(report, "torch-flash")["reasons"] == ["float16: no device", "bfloat16: no device"]
    assert tables.why(of(report, "torch-flash")) == "no device"
    assert tables.why(of(report, "triton-tutorial")).startswith("bfloat16: ")


def test_a_dtype_without_cases_names_its_reason():
    found = evidence()
    kept = tuple(v for v in found.verdicts if v.dtype != "float8_e4m3fn")
    left = (
        *found.not_run,
        NotRun(variant="triton-fp8-forward", reason="needs compute capability 8.9"),
    )
    variant = of(
        build(dataclasses.replace(found, verdicts=kept, not_run=left), BINS), "triton-fp8-forward"
    )
    assert variant["reasons"] == ["float8_e4m3fn: needs compute capability 8.9"]
