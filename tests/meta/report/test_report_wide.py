"""Reports of more than O and LSE: gradients, builds, 8-bit inputs."""

import dataclasses
import math
import re
from dataclasses import asdict

import pytest

from tests.harness.fake_campaign import ARCHES, BINS, built, evidence, gradient_verdict, of, verdict
from tests.harness.rendered import as_html, as_markdown
from tests.meta.report.test_report_rendering import Elements
from verify.evidence import NotRun
from verify.evidence.strict_json import loads
from verify.problem import Problem
from verify.problem.case import replay_command
from verify.report import Report, build, dumps, parse, plots, tables, worst_cases
from verify.report.schema import TENSORS
from verify.report.sections import builds, closest, declared, variants
from verify.variant import Resources


@pytest.fixture(scope="module")
def report() -> Report:
    return build(evidence(), BINS)


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first Markdown table under a heading."""
    lines = page.split(f"\n{heading}\n", 1)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def needs(*numbers: int) -> dict[str, int]:
    """Resources as data."""
    return asdict(Resources(*numbers))


class TestTensors:
    def test_a_backward_has_gradients_and_no_output(self, report):
        d = of(report, "triton-backward")["dtypes"][0]
        assert list(d["tensors"]) == list(d["samples"]) == ["dq", "dk", "dv"]
        assert [list(o["tensors"]) for o in d["oracles"]] == [["dq", "dk", "dv"]]
        assert (d["lse_ulp"], d["bound_ratio"]) == (None, None)
        assert d["tensors"]["dk"]["r"]["count"] == 60

    def test_a_forward_has_no_gradients(self, report):
        d = of(report, "triton-fwd")["dtypes"][0]
        assert (list(d["tensors"]), list(d["samples"])) == (["out", "lse"], ["out"])
        assert {o["oracle"]: list(o["tensors"]) for o in d["oracles"]} == {
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
        assert [o["tensors"].keys() for o in d["oracles"] if o["oracle"] == "gradient_bound"] == [
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
            "problem": top.problem,
            "config": top.config,
            "oracle": "gradient_bound",
            "replay": replay_command(top.case),
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


class TestBuilds:
    def test_one_row_per_architecture(self, report):
        rows = of(report, "triton-fwd")["builds"]
        assert [row["arch"] for row in rows] == list(ARCHES)
        assert all((row["builds"], row["compiled"], row["failing"]) == (2, 2, []) for row in rows)
        spilling = {
            row["arch"]: (
                row["spilling"],
                row["spill_build"],
                row["spill_stores"],
                row["spill_loads"],
            )
            for row in rows
        }
        assert spilling.pop("sm_90a") == (1, "m128n64-float16-d256", 96, 128)
        assert set(spilling.values()) == {(0, "", 0, 0)}

    def test_the_largest_and_the_worst(self):
        found = [
            built("triton-fwd", "sm_80", "a", resources=needs(64, 9, 8, 4, 4)),
            built("triton-fwd", "sm_80", "b", resources=needs(32, 99, 0, 0, 9)),
            built("triton-fwd", "sm_80", "c", resources=None, error="no"),
        ]
        (row,) = of(
            build(dataclasses.replace(evidence(), builds=tuple(found)), BINS), "triton-fwd"
        )["builds"]
        assert (row["registers"], row["shared"], row["stack"], row["seconds"]) == (64, 99, 8, 4.5)
        assert (row["spilling"], row["spill_build"], row["spill_stores"], row["spill_loads"]) == (
            2,
            "b",
            0,
            9,
        )

    def test_a_failed_compile_is_red(self):
        found = evidence()
        broken = built("torch-flash", "sm_80", resources=None, error="ptxas: no")
        red = build(dataclasses.replace(found, builds=(broken,)), BINS)
        variant = of(red, "torch-flash")
        assert (variant["status"], variant["reasons"], red["status"]) == (
            "red",
            ["sm_80: 1 of 1 builds fail"],
            "red",
        )
        assert all(d["status"] == "green" for d in variant["dtypes"])
        assert (variant["builds"][0]["registers"], variant["builds"][0]["error"]) == (
            None,
            "ptxas: no",
        )

    def test_a_failed_compile_of_a_variant_that_cannot_run_here_is_red(self):
        found = evidence()
        kept = tuple(v for v in found.verdicts if v.variant == "torch-flash")
        entries = tuple(e for e in found.variants if e.ref in ("torch-flash", "gluon-hopper"))
        some = dataclasses.replace(
            found, variants=entries, verdicts=kept, lost=(), not_run=(), builds=()
        )
        assert build(some, BINS)["status"] == "green"
        broken = dataclasses.replace(
            some, builds=(built("gluon-hopper", "sm_90a", resources=None, error="no"),)
        )
        red = build(broken, BINS)
        assert (red["status"], of(red, "gluon-hopper")["status"]) == ("red", "red")
        assert of(red, "gluon-hopper")["reasons"] == [
            "unavailable: needs compute capability 9.0",
            "sm_90a: 1 of 1 builds fail",
        ]

    def test_a_build_left_out_is_no_failure(self, report):
        (row,) = of(report, "ptx-mma")["builds"]
        assert (row["builds"], row["compiled"], row["failing"], row["error"]) == (2, 1, [], "")

    def test_of_a_variant_with_no_declaration(self):
        found = build(dataclasses.replace(evidence(), builds=(built("stranger", "sm_80"),)), BINS)
        assert of(found, "stranger")["builds"][0]["compiled"] == 1

    def test_a_long_message_is_cut(self):
        broken = built("triton-fwd", "sm_80", resources=None, error="x" * 100_000)
        found = build(dataclasses.replace(evidence(), builds=(broken,)), BINS)
        assert len(of(found, "triton-fwd")["builds"][0]["error"]) < 5000


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


class TestPlots:
    def test_gradients_have_a_panel_of_their_own(self, report):
        image = plots.ratio_plot(report)
        assert ">Gradients dQ, dK, dV<" in image
        assert image.count(">float16 dK<") == 1
        forward = [v for v in report["variants"] if v["ref"] != "triton-backward"]
        assert ">Gradients dQ, dK, dV<" not in plots.ratio_plot(report | {"variants": forward})

    def test_a_backward_alone(self, report):
        image = plots.ratio_plot(report | {"variants": [of(report, "triton-backward")]})
        assert ">Gradients dQ, dK, dV<" in image
        assert ">Output O<" not in image

    def test_error_plot_has_a_row_per_gradient(self, report):
        image = plots.error_plot(of(report, "triton-backward"), "v")
        assert [f"largest error of {name}" in image for name in ("O", "dQ", "dK", "dV")] == [
            False,
            True,
            True,
            True,
        ]
        assert "largest error of O" in plots.error_plot(of(report, "triton-fwd"), "v")

    def test_a_tiny_error_does_not_squeeze_the_others(self):
        def lowest(tiny: float) -> float:
            measures = [
                {"seqlen_kv": 4.0, "max_error_out": size, "error_bound_out": size}
                for size in (1e-3, tiny)
            ]
            made = [
                verdict("triton-fwd", "float16", 3 * i, measures=found)
                for i, found in enumerate(measures)
            ]
            image = plots.error_plot(
                of(
                    build(dataclasses.replace(evidence(), verdicts=tuple(made)), BINS), "triton-fwd"
                ),
                "v",
            )
            return min(float(tick) for tick in re.findall(r">1?(\de-?\d+)<", image))

        assert lowest(1e-37) == lowest(1e-13)
        assert lowest(1e-37) >= 1e-14
        assert lowest(1e-6) > 1e-8

    def test_infinite_and_missing_gradients_draw(self):
        changes = [
            {"r_dq": math.inf, "max_error_dq": math.inf},
            {"r_dk": 0.0, "max_error_dk": 0.0},
            {"r_dv": math.nan},
        ]
        made = [
            verdict("triton-fwd", "float16", 3 * i, measures={"seqlen_kv": 4.0} | c)
            for i, c in enumerate(changes)
        ]
        found = build(dataclasses.replace(evidence(), verdicts=tuple(made)), BINS)
        assert "<svg" in plots.ratio_plot(found)
        assert plots.error_plot(of(found, "triton-fwd"), "v") is None

    def test_variant_names_stand_clear_of_long_dtypes(self, report):
        assert "float8_e4m3fn" in plots.ratio_plot(report)


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
