"""What a reader must see beside a verdict: lenient, narrow and undeclared variants, claims, and
gradients that were not judged."""

from __future__ import annotations

import dataclasses
import datetime
import html
import io
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from tests.harness.fake_campaign import BINS, entry, evidence, failing, verdict
from tests.harness.rendered import as_html, as_markdown
from verify.bootstrap import ROOT
from verify.cli.summary import Outcome, _shortfalls, table
from verify.evidence import Evidence, Verdict
from verify.evidence.flat_numerics import FORWARD, in_parts
from verify.evidence.known_failures import Xfail, Xfails
from verify.problem import Problem
from verify.report import Report, build, plots, read
from verify.report.outcome import incomplete, outcome
from verify.report.schema import VariantReport
from verify.report.states import (
    CASES,
    COUNTED,
    FLOORS,
    GRAVE,
    claims,
    kind,
    states,
    strictly,
    unjudged,
)
from verify.report.terminal import Beside, gaps, notes
from verify.variant import GradientNumerics, Numerics, Support
from verify.variant.numerics import leaves

DTYPES = ("float16", "bfloat16")


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time, and say nothing of states."""
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)


def campaign(
    *,
    support: dict[str, Any] | None = None,
    numerics: dict[str, Any] | None = None,
    ratio: float = 2.0,
    **changes: Any,
) -> Evidence:
    """One variant of which everything holds.  ratio: of its bounds to the best ones."""
    claimed = asdict(Support(dtypes=DTYPES, head_dims=range(16, 129)))
    claimed |= {"head_dims": list(claimed["head_dims"])} | (support or {})
    found = evidence(0)
    made = entry("mine", support=claimed, numerics=asdict(Numerics()) | (numerics or {}), **changes)
    verdicts = [verdict("mine", dtype, i) for dtype in claimed["dtypes"] for i in range(30)]
    verdicts = [
        dataclasses.replace(
            v, measures=v.measures | ({"bound_ratio": ratio} if "bound_ratio" in v.measures else {})
        )
        for v in verdicts
    ]
    return dataclasses.replace(
        found, variants=(made,), verdicts=tuple(verdicts), lost=(), not_run=(), builds=(), drawn=()
    )


def scored(rounded: int = 0, undecided: int = 0) -> Evidence:
    """A plain function: of 10 cases of each dtype so many exceed the bounds of fp32 scores."""
    found = campaign(undeclared=True)
    words = ["undecided"] * undecided + ["rounded"] * rounded
    words += ["within"] * (10 - len(words))
    asked = [
        dataclasses.replace(
            verdict("mine", dtype, at),
            case=f"case-{dtype}-{at}",
            oracle="kept_scores",
            group="accuracy",
            measures={"sharper_out": 0.9 + at},
            observed={"scores": word},
        )
        for dtype in DTYPES
        for at, word in enumerate(words)
    ]
    return dataclasses.replace(found, verdicts=(*found.verdicts, *asked))


def report(**declared: Any) -> Report:
    return build(campaign(**declared), BINS)


def shown(of: Report) -> str:
    """What the terminal prints of it under the table."""
    stream = io.StringIO()
    console = Console(file=stream, width=400)
    for line in (*notes(of), *gaps(of)):
        console.print(line)
    return stream.getvalue()


def row(dtype: str, found: Evidence, of: Report, known: Xfails | None = None) -> list[str]:
    """The cells of that dtype's line in the terminal."""
    outcome = Outcome(found, known or Xfails(), (), _shortfalls(of))
    stream = io.StringIO()
    Console(file=stream, width=200).print(table(list(outcome.lines()), Beside(of)))
    (line,) = [
        line
        for line in stream.getvalue().splitlines()
        if line.startswith("│") and f" {dtype} " in line
    ]
    return [cell.strip() for cell in line.strip("│").split("│")]


def everywhere(of: Report) -> list[str]:
    """What a reader of the terminal, of the Markdown and of the page sees."""
    return [shown(of), html.unescape(as_markdown(of)), html.unescape(as_html(of))]


class TestNarrow:
    @pytest.mark.parametrize(
        ("support", "said"),
        [
            ({"max_seqlen": 1}, "narrow: seqlen <= 1"),
            ({"max_seqlen": 128}, "narrow: seqlen <= 128"),
            ({"min_seqlen": 512, "max_seqlen": 512}, "narrow: seqlen = 512"),
            ({"min_seqlen": 512, "max_seqlen": 600}, "narrow: seqlen 512 to 600"),
            ({"head_dims": [1, 2]}, "narrow: head dim <= 2"),
        ],
    )
    def test_a_claim_that_says_little_is_said_everywhere(
        self, support: dict[str, Any], said: str
    ) -> None:
        found = report(support=support)
        assert found["status"] == "green"
        assert strictly(found) == [f"mine: {said}"]
        for page in everywhere(found):
            assert said in page
        assert row("float16", campaign(support=support), found)[-1] == "holds, narrow"
        assert "⚠️ **narrow**" in as_markdown(found)
        assert '<span class="warn">narrow</span>' in as_html(found)
        assert "1 narrow." in as_html(found)

    @pytest.mark.parametrize(
        "support",
        [
            {},
            {"max_seqlen": 129},
            {
                "head_dims": [64],
                "dtypes": ["float16"],
                "masks": ["causal.square"],
                "cross_lengths": False,
            },
            {"min_seqlen": 1024},
            {"min_seqlen": 64, "max_seqlen": 1024},
            {"scales": "default", "layouts": "contiguous"},
        ],
    )
    def test_what_is_normal_is_not_narrow(self, support: dict[str, Any]) -> None:
        found = report(support=support)
        assert strictly(found) == []
        assert all("narrow:" not in page for page in everywhere(found))


class TestLenient:
    @pytest.mark.parametrize(
        ("recorded", "field"),
        [
            ({"softmax": {"scale_roundings": 20000}}, "softmax.scale_roundings"),
            ({"output_roundings": 20000}, "output.roundings"),  # as flat records name it
            ({"lazy_rescale": 20000}, "softmax.maximum.lag"),
        ],
    )
    def test_a_count_that_no_honest_kernel_has(self, recorded: dict[str, Any], field: str) -> None:
        found = report(numerics=recorded)
        said = f"{field} is 20,000, honest kernels have at most {COUNTED[field]}"
        assert strictly(found) == [f"mine: lenient: {said}"]
        for page in everywhere(found):
            assert said in page.replace("\u00a0", " ")
        assert row("float16", campaign(), found)[-1] == "holds, lenient"

    def test_counts_of_gradients_too(self) -> None:
        declared = asdict(GradientNumerics()) | {"gradient_roundings": 500}
        found = report(entries=("forward", "backward"), gradients=declared)
        assert strictly(found) == [
            "mine: lenient: sums.roundings is 500, honest kernels have at most 8"
        ]

    def test_bounds_far_above_the_best(self) -> None:
        found = report(ratio=107.0)
        assert strictly(found) == [
            f"mine: lenient: bound 107x the best ({dtype})" for dtype in DTYPES
        ]
        for page in everywhere(found):
            assert "lenient: bound 107x the best" in page
        assert row("bfloat16", campaign(), found)[-2:] == ["107", "holds, lenient"]
        assert strictly(report(ratio=float("inf")))
        assert strictly(report(ratio=float("nan")))

    def test_few_cases_say_little(self) -> None:
        few = campaign(ratio=107.0)
        having = [v for v in few.verdicts if "bound_ratio" in v.measures]
        others = [v for v in few.verdicts if "bound_ratio" not in v.measures]
        verdicts = (*others, *having[: CASES - 1])
        assert strictly(build(dataclasses.replace(few, verdicts=verdicts), BINS)) == []

    @pytest.mark.parametrize(
        ("numerics", "dtype", "wanted"),
        [
            ({}, "float16", "fine"),
            ({"scores": "input"}, "bfloat16", "16 bits"),
            ({"scores": "input"}, "float32", "fine"),
            ({"accumulator": "float16"}, "float16", "16 bits"),
            ({"delta_of": "weights"}, "float16", "fine"),
            ({"accumulator": "bfloat16"}, "bfloat16", "16 bits"),
            ({"prescale": "q"}, "float16", "16 bits"),
            ({"prescale": "k"}, "bfloat16", "scaled bf16"),
            ({"prescale": "k", "operands": "bfloat16"}, "float32", "scaled bf16"),
            ({"prescale": "sqrt", "operands": "float32"}, "float16", "fine"),
            ({"prescale": "sqrt", "operands": "float32"}, "bfloat16", "fine"),
            ({"float32_products": "tf32"}, "float32", "tf32"),
            ({"float32_products": "tf32"}, "float16", "fine"),
            ({"float32_products": "tf32x3"}, "float32", "fine"),
            ({}, "float8_e4m3fn", "8 bits"),
        ],
    )
    def test_honest_words_have_a_floor_of_their_own(
        self, numerics: dict[str, Any], dtype: str, wanted: str
    ) -> None:
        assert kind(leaves(in_parts(numerics, FORWARD)), dtype) == wanted

    def test_weak_and_honest_words_are_claimed_and_not_lenient(self) -> None:
        found = report(numerics={"scores": "input"}, ratio=33.0)
        assert strictly(found) == []
        assert "float16 and bfloat16 with 16-bit scores or sums" in claims(found["variants"][0])
        assert strictly(report(numerics={"scores": "input"}, ratio=2 * FLOORS["16 bits"]))

    def test_a_plain_function_is_undeclared(self) -> None:
        found = report(numerics={"scale_roundings": 3}, ratio=1e6, undeclared=True)
        assert strictly(found) == []
        for page in everywhere(found):
            assert "undeclared: judged by the weakest honest arithmetic" in page

    @pytest.mark.parametrize(
        ("of", "said", "grave"),
        [
            ({}, "float16: fp32 scores, P in float16, fp32 accumulators", False),
            ({"rounded": 2}, "scores are rounded in 2 of 10 cases", False),
            ({"rounded": 1, "undecided": 3}, "scores are rounded in 1 of 10 cases", False),
            ({"undecided": 3}, "3 of 10 cases exceed fp32 scores, P in bfloat16", True),
        ],
    )
    def test_a_plain_function_is_judged_by_what_it_keeps(
        self, of: dict[str, int], said: str, grave: bool
    ) -> None:
        found = build(scored(**of), BINS)
        (undeclared, *others) = (state for state in states(found["variants"][0]))
        assert said in str(undeclared)
        assert [state.name for state in others] == ["unexplained"] * 2 * grave
        assert bool(strictly(found)) == grave
        for page in everywhere(found):
            assert said in " ".join(page.split())
            assert ("unexplained" in page.replace("Unexplained: a plain", "")) == grave
        if grave:
            assert "r = 2.9 in case-bfloat16-2" in strictly(found)[1]

    @pytest.mark.parametrize(
        "device", sorted(path.parent.name for path in (ROOT / "reports").glob("*/report.json"))
    )
    def test_the_collection_is_neither_lenient_nor_narrow(self, device: str) -> None:
        known = read(ROOT / "reports" / device)
        assert strictly(known) == []
        assert not any(states(variant) for variant in known["variants"])


def kept(measure: str, of_five: int) -> VariantReport:
    """A variant of which so many of five runs kept 80 MiB, by that measure."""
    found = campaign()
    verdicts = [
        dataclasses.replace(
            v,
            oracle="execution",
            measures={measure: 80.0 * (1 << 20)} if i % 5 < of_five else {},
        )
        for i, v in enumerate(found.verdicts)
    ]
    return build(dataclasses.replace(found, verdicts=tuple(verdicts)), BINS)["variants"][0]


class TestGrowing:
    @pytest.mark.parametrize(
        ("measure", "said"),
        [
            ("memory_growth", "its process grows by 80 MiB in most runs"),
            (
                "device_memory_growth",
                "it keeps 81,920.0 KiB more of the device's memory in most runs",
            ),
        ],
    )
    def test_memory_that_most_runs_keep_is_said(self, measure: str, said: str) -> None:
        assert [str(state) for state in states(kept(measure, 3))] == [f"growing: {said}"]
        assert states(kept(measure, 2)) == []
        assert not any(state.name in GRAVE for state in states(kept(measure, 5)))

    def test_what_the_whole_device_has_less_marks_nobody(self) -> None:
        assert states(kept("device_memory_taken", 5)) == []


class TestGradients:
    def test_a_missing_backward_is_said_in_words(self) -> None:
        found = report()
        assert unjudged(found["variants"][0]) == "gradients: not judged (no declared backward)"
        assert row("float16", campaign(), found)[6] == "not judged"
        assert "gradients: not judged (no declared backward): mine" in shown(found)
        assert "gradients: not judged (no declared backward)" in as_markdown(found)
        assert "gradients: not judged (no declared backward)" in as_html(found)

    def test_a_backward_that_no_case_measured(self) -> None:
        found = report(entries=("forward", "backward"), gradients=asdict(GradientNumerics()))
        assert unjudged(found["variants"][0]) == "gradients: not judged (no case measured them)"

    def test_judged_gradients_are_not_mentioned(self) -> None:
        known = build(evidence(12), BINS)
        (backward,) = [v for v in known["variants"] if v["ref"] == "triton-backward"]
        assert unjudged(backward) == ""


class TestCounts:
    def test_failing_cases_and_cases_count_the_same(self) -> None:
        """Shrunk failures are in neither number."""
        found = campaign()
        problems = [
            Problem(seqlen_q=n, seqlen_kv=n, head_dim=64, dtype="float16") for n in range(1, 57)
        ]
        phases = ["generate", *["shrink"] * 55]
        failed: list[Verdict] = [
            failing("mine", "float16", 900 + i, p, phase=phases[i]) for i, p in enumerate(problems)
        ]
        judged = dataclasses.replace(found, verdicts=(*found.verdicts, *failed))
        known = build(judged, BINS)
        assert row("float16", judged, known)[2:4] == ["31", "1"]
        (failure,) = known["variants"][0]["failing"]
        assert (failure["cases"], failure["shrunk"]) == (56, 55)
        for page in everywhere(known)[1:]:
            assert "the smallest of 1 failing and 55 met while shrinking" in page
            assert "1 of 31 fail" in page
        assert row("float16", judged, known)[-1] == "wrong"


class TestOutcome:
    def test_clean(self) -> None:
        assert outcome(report()) == "clean"

    def test_an_empty_bin_is_incomplete(self) -> None:
        known = build(campaign(), [*BINS, "unheard of"])
        assert outcome(known) == "incomplete"
        assert row("float16", campaign(), known)[-1] == "incomplete"
        assert "incomplete: mine: 1 of 9 coverage bins empty" in shown(known)

    def test_a_dtype_that_was_not_run(self) -> None:
        known = report(support={"dtypes": [*DTYPES, "float32"]})
        without = dataclasses.replace(
            campaign(support={"dtypes": [*DTYPES, "float32"]}),
            verdicts=tuple(v for v in campaign().verdicts),
        )
        assert outcome(known) == "clean"
        assert outcome(build(without, BINS)) == "incomplete"

    def test_known_defects_fail_nothing_and_hide_nothing(self) -> None:
        found = campaign()
        problem = Problem(seqlen_q=5, seqlen_kv=7, head_dim=64, dtype="float16")
        failed = failing("mine", "float16", 900, problem)
        judged = dataclasses.replace(found, verdicts=(*found.verdicts, failed))
        known = Xfails(
            (Xfail(cases=".*", link="x", expires=datetime.date(2100, 1, 1), witness=failed.case),)
        )
        assert outcome(build(judged, BINS)) == "failed"
        expected = build(judged, BINS, known)
        assert (expected["status"], outcome(expected)) == ("red", "clean")
        assert row("float16", judged, expected, known)[-1] == "known defect"
        short = build(judged, [*BINS, "unheard of"], known)
        assert outcome(short) == "incomplete"
        assert incomplete(short)

    def test_nothing_judged_is_incomplete(self) -> None:
        found = campaign()
        assert outcome(build(dataclasses.replace(found, verdicts=()), BINS)) == "incomplete"
