"""Reports: built from synthetic evidence, rendered, read back, compared."""

import dataclasses
import html.parser
import json
import math
import random
import re

import pytest

from verify import strict_json
from verify.evidence import Begin, Drawn, Evidence, Finding, NotRun, Recorder, Run, VariantEntry, Verdict, load
from verify.problem import Problem
from verify.report import (
    Report,
    ReportError,
    build,
    compare,
    dumps,
    parse,
    plots,
    read,
    render_comparison,
    statistics,
    text,
    worst_cases,
    write,
)
from verify.report import html as html_report
from verify.report import markdown as markdown_report
from verify.report.tables import intervals

BINS = ("kv_tiles>=3", "ragged_tail", "seqlen_q!=seqlen_kv", "gqa", "empty_row", "rescale", "mask:full", "mask:causal")
DEVICE = {
    "slug": "nvidia-h100-80gb-hbm3",
    "kind": "cuda",
    "name": "NVIDIA H100 80GB HBM3",
    "capability": "9.0",
    "driver": "580.65",
    "cuda": "13.0",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "numpy": "2.3.0",
    "python": "3.12.3",
    "platform": "Linux x86_64",
    "cores": 16,
}
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


def entry(ref: str, dtypes=("float16", "bfloat16"), **changes) -> VariantEntry:
    values = {
        "ref": ref,
        "name": ref,
        "family": ref.split("-", maxsplit=1)[0],
        "path": f"kernels/{ref.split('-', maxsplit=1)[0]}/{ref.replace('-', '_')}.py",
        "source_hash": f"{abs(hash_of(ref)):016x}",
        "configs": ("m128n64w4s3", "m64n64w4s2"),
        "support": {"dtypes": list(dtypes), "head_dims": list(range(16, 257)), "masks": ["full", "causal"], "softcap": False},
        "numerics": {
            "operands": "input",
            "accumulator": "float32",
            "exp": "ex2.approx",
            "block_n": None,
            "probability": "input",
        },
        "contract": {"lse": "natural", "empty_row_out": 0.0, "empty_row_lse": -math.inf, "deterministic": True},
    }
    return VariantEntry(**(values | changes))


def hash_of(word: str) -> int:
    return random.Random(word).getrandbits(64)


def verdict(ref: str, dtype: str, index: int, **changes) -> Verdict:
    draw = random.Random(f"{ref} {dtype} {index}")
    oracle, group = [("forward", "bound"), ("counting", "exact"), ("gather", "exact")][index % 3]
    seqlen_kv = draw.choice([1, 17, 64, 129, 333, 512, 1024, 2048])
    problem = Problem(seqlen_q=draw.choice([1, 16, 65]), seqlen_kv=seqlen_kv, head_dim=64, dtype=dtype, seed=index).name
    measures = {"seqlen_kv": float(seqlen_kv)}
    if oracle == "forward":
        r = min(0.9, draw.lognormvariate(-2.2, 0.7))
        bound = ROUNDOFF[dtype] * 4 * draw.lognormvariate(0, 0.5)
        measures |= {"r_out": r, "r_lse": r / 9, "max_error": r * bound, "error_bound": bound}
        measures |= {"bound_ratio": 1.3 if "tutorial" in ref else 1.0, "lse_ulp": draw.lognormvariate(0.5, 0.8)}
    elif oracle == "gather":
        measures |= {"r_out": 0.0, "max_error": 0.0}
    steps = {"generate": 1e-3, "run": 2e-3, "reference": 8e-3, "bound": 6e-3, "record": 1e-4}
    values = {
        "case": f"{ref}/m128n64w4s3/{oracle}/{problem}",
        "variant": ref,
        "config": "m128n64w4s3",
        "dtype": dtype,
        "oracle": oracle,
        "group": group,
        "outcome": "pass",
        "phase": "witness" if index < 2 else "generate",
        "problem": problem,
        "seconds": {step: seconds * draw.uniform(0.5, 3) for step, seconds in steps.items()},
        "measures": measures,
        "bins": (BINS[index % len(BINS)], BINS[(index + 3) % len(BINS)]),
        "time": 1.0 + index,
    }
    return Verdict(**(values | changes))


def failing(ref: str, dtype: str, index: int, problem: Problem, **changes) -> Verdict:
    finding = Finding(
        oracle="forward",
        message="O differs from the reference by 7.1 times the bound\nlargest at [0, 1, 14, 3], where a row has two keys",
        got=0.0312,
        bound=0.0044,
        where="[0, 1, 14, 3]",
        count=12,
        total=1040,
    )
    values = {
        "case": f"{ref}/m64n64w4s2/forward/{problem.name}",
        "config": "m64n64w4s2",
        "oracle": "forward",
        "group": "bound",
        "outcome": "fail",
        "problem": problem.name,
        "measures": {
            "seqlen_kv": float(problem.seqlen_kv),
            "r_out": 7.1,
            "r_lse": math.nan,
            "max_error": 0.0312,
            "error_bound": 0.0044,
        },
        "finding": finding,
    }
    return verdict(ref, dtype, index, **(values | changes))


def evidence(cases: int = 60, *, worse: float = 1.0) -> Evidence:
    """Three variants that ran (one of them fails), one incomplete, one unavailable, and a lost case."""
    entries = [
        entry("torch-flash"),
        entry("triton-fwd"),
        entry("triton-tutorial"),
        entry("ptx-mma", ("float16",)),
        entry("gluon-hopper", unavailable="needs compute capability 9.0"),
    ]
    verdicts = [verdict(e.ref, d, i) for e in entries[:3] for d in ("float16", "bfloat16") for i in range(cases)]
    verdicts += [verdict("ptx-mma", "float16", i, bins=BINS[:2]) for i in range(4)]
    if worse != 1:
        verdicts = [
            dataclasses.replace(v, measures=v.measures | {k: v.measures[k] * worse for k in ("r_out",) if k in v.measures})
            for v in verdicts
        ]
    large = Problem(seqlen_q=65, seqlen_kv=333, head_dim=64, dtype="bfloat16", seed=1)
    small = Problem(seqlen_q=15, seqlen_kv=2, head_dim=16, dtype="bfloat16", seed=1)
    verdicts += [
        failing("triton-tutorial", "bfloat16", 900, large),
        failing("triton-tutorial", "bfloat16", 901, small, phase="shrink"),
    ]
    drawn = [
        Drawn(variant=e.ref, dtype=d, group="bound", drawn=340, refused=12)
        for e in entries[:3]
        for d in ("float16", "bfloat16")
    ]
    return Evidence(
        runs=(
            Run(
                run="20250101T000000Z-abc123",
                started="2025-01-01T00:00:00+00:00",
                profile="ci",
                device=DEVICE,
                versions={"attention-verify": "0.1.0"},
            ),
        ),
        variants=tuple(sorted(entries, key=lambda e: e.ref)),
        verdicts=tuple(sorted(verdicts, key=lambda v: (v.case, v.oracle))),
        lost=(
            Begin(case="ptx-mma/default/forward/sq=3,skv=5,d=16,dtype=float16", phase="generate", time=1.0, variant="ptx-mma"),
        ),
        drawn=tuple(drawn),
        not_run=(NotRun(variant="cute-fa3", reason="nvidia-cutlass is not installed"),),
    )


@pytest.fixture(scope="module")
def report() -> Report:
    return build(evidence(), BINS)


def of(report: Report, ref: str):
    return next(v for v in report["variants"] if v["ref"] == ref)


class TestBuild:
    def test_statuses(self, report):
        found = {v["ref"]: v["status"] for v in report["variants"]}
        assert found == {
            "torch-flash": "green",
            "triton-fwd": "green",
            "triton-tutorial": "red",
            "ptx-mma": "grey",
            "gluon-hopper": "grey",
        }
        assert report["status"] == "red"

    def test_reasons_name_what_is_missing(self, report):
        assert of(report, "ptx-mma")["reasons"] == ["float16: 6 of 8 coverage bins empty", "1 case launched but never judged"]
        assert of(report, "gluon-hopper")["reasons"] == ["unavailable: needs compute capability 9.0"]
        assert of(report, "ptx-mma")["dtypes"][0]["bins_missing"] == sorted(BINS[2:])
        assert report["reasons"] == ["cute-fa3 not run: nvidia-cutlass is not installed"]

    def test_a_dtype_that_was_not_run_keeps_a_variant_from_green(self):
        found = evidence()
        entries = tuple(
            dataclasses.replace(e, support=e.support | {"dtypes": [*e.support["dtypes"], "float32"]}) for e in found.variants
        )
        report = build(
            dataclasses.replace(
                found, variants=entries, not_run=(NotRun(variant="torch-flash", dtype="float32", reason="left out"),)
            ),
            BINS,
        )
        assert (of(report, "torch-flash")["status"], of(report, "torch-flash")["reasons"]) == ("grey", ["float32: left out"])
        assert of(report, "triton-fwd")["reasons"] == ["float32: not run"]

    def test_shrinking_counts_in_no_statistic_but_shows_the_smallest_failure(self, report):
        bfloat16 = of(report, "triton-tutorial")["dtypes"][1]
        assert (bfloat16["cases"], bfloat16["failures"]) == (61, 1)
        (failure,) = of(report, "triton-tutorial")["failing"]
        assert (failure["phase"], failure["cases"]) == ("shrink", 2)
        assert "sq=15,skv=2" in failure["problem"]

    def test_a_failure_found_only_while_shrinking_is_red(self):
        found = evidence()
        kept = tuple(v for v in found.verdicts if v.outcome == "pass" or v.phase == "shrink")
        variant = of(build(dataclasses.replace(found, verdicts=kept), BINS), "triton-tutorial")
        assert (variant["status"], variant["reasons"]) == ("red", ["bfloat16: 1 case failed while shrinking"])

    def test_worst_case_is_replayable(self, report):
        worst = of(report, "triton-tutorial")["dtypes"][1]["worst_out"]
        assert worst["value"] == 7.1
        assert worst["replay"] == f"python -m verify replay '{worst['case']}'"
        assert statistics.replay_command("a'b") == """python -m verify replay 'a'"'"'b'"""

    def test_the_worst_lse_is_the_nan(self, report):
        worst = of(report, "triton-tutorial")["dtypes"][1]["worst_lse"]
        assert math.isnan(worst["value"])

    def test_bins_by_variant(self):
        report = build(evidence(), lambda entry, dtype: BINS[:2] if entry.ref == "ptx-mma" else BINS)
        assert of(report, "ptx-mma")["dtypes"][0]["status"] == "green"

    def test_evidence_of_two_devices(self):
        found = evidence()
        other = dataclasses.replace(found.runs[0], device=DEVICE | {"slug": "cpu-x86_64"})
        with pytest.raises(ReportError, match="mixes devices: cpu-x86_64, nvidia-h100-80gb-hbm3"):
            build(dataclasses.replace(found, runs=(*found.runs, other)), BINS)
        with pytest.raises(ReportError, match="no run record"):
            build(Evidence(), BINS)

    def test_a_changed_source_and_a_missing_declaration_are_not_green(self):
        found = dataclasses.replace(evidence(), changed=("torch-flash",))
        found = dataclasses.replace(found, variants=tuple(e for e in found.variants if e.ref != "triton-fwd"))
        report = build(found, BINS)
        assert of(report, "torch-flash")["reasons"] == ["its source changed during the run"]
        assert of(report, "triton-fwd")["status"] == "grey"

    def test_no_absolute_path_gets_in(self):
        found = dataclasses.replace(evidence(), variants=(entry("mine", path="/home/someone/mine.py"),))
        assert of(build(found, BINS), "mine")["path"] == "mine.py"


class TestStatistics:
    def test_quantiles_are_members(self):
        found = statistics.distribution([float(i) for i in range(1, 101)], statistics.EDGES_ULP)
        assert (found["minimum"], found["median"], found["p90"], found["p99"], found["maximum"]) == (1, 50, 90, 99, 100)

    def test_histogram_adds_up_and_puts_edges_below(self):
        found = statistics.distribution([0.0, 0.5, 1.0, 1.5, math.inf, math.nan], statistics.EDGES_R)
        counts = dict(zip(found["edges"][1:], found["histogram"], strict=True))
        assert (counts[2**-10], counts[0.5], counts[1.0], counts[2.0], counts[math.inf]) == (1, 1, 1, 1, 2)
        assert (sum(found["histogram"]), found["not_finite"]) == (6, 2)

    def test_samples_are_bounded_and_keep_the_worst(self):
        verdicts = [verdict("triton-fwd", "float16", i) for i in range(0, 3000, 3)]
        found = statistics.samples(verdicts)
        assert len(found) <= statistics.MAX_SAMPLES
        assert max(s["r_out"] for s in found) == max(v.measures["r_out"] for v in verdicts)

    def test_intervals(self):
        assert intervals([*range(16, 257)]) == "16-256"
        assert intervals([8, 16, 24, 64]) == "8-24 by 8, 64"
        assert intervals([64, 128]) == "64, 128"
        assert intervals([]) == ""


class TestFiles:
    def test_round_trip_and_bytes(self, report, tmp_path):
        first = write(report, tmp_path / "a")
        second = write(build(evidence(), BINS), tmp_path / "b")
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
        assert dumps(read(tmp_path / "a")) == first[0].read_text(encoding="utf-8")
        assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["report.html", "report.json", "report.md"]

    def test_json_is_strict(self, report):
        data = json.loads(dumps(report), parse_constant=lambda token: pytest.fail(token))
        assert next(v for v in data["variants"] if v["ref"] == "torch-flash")["contract"]["empty_row_lse"] == "-inf"
        assert of(parse(data), "torch-flash")["contract"]["empty_row_lse"] == -math.inf

    def test_from_disk(self, tmp_path):
        found = evidence(6)
        with Recorder(tmp_path, "gw0") as recorder:
            for record in (*found.runs, *found.variants, *found.lost, *found.verdicts, *found.drawn, *found.not_run):
                recorder.write(record)
        assert dumps(build(load(tmp_path), BINS)) == dumps(build(found, BINS))

    def test_large_campaigns_stay_small(self, tmp_path):
        paths = write(build(evidence(900), BINS), tmp_path)
        sizes = [path.stat().st_size for path in paths]
        assert all(size < limit for size, limit in zip(sizes, (1_000_000, 1 << 20, 1_500_000), strict=True))

    def test_markdown_has_a_limit(self, report):
        failure = of(report, "triton-tutorial")["failing"][0]
        many = [failure | {"config": f"c{i}", "message": "x" * 5000, "replay": "y" * 20_000} for i in range(300)]
        swollen = report | {"variants": [v | {"failing": many} for v in report["variants"]]}
        assert len(markdown_report.render(swollen).encode()) < 1 << 20


class TestReading:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "is no report"),
            ("[]", "no schema version"),
            ('{"schema": NaN}', "NaN is not JSON"),
            ('{"schema": 2}', "has schema version 2; this version of verify reads 1"),
            ('{"schema": true}', "has schema version True"),
            ('{"schema": 1}', "report.run: is missing"),
        ],
    )
    def test_wrong_files(self, tmp_path, content, message):
        (tmp_path / "report.json").write_text(content)
        with pytest.raises(ReportError, match=re.escape(message)) as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)

    def test_missing_file(self, tmp_path):
        with pytest.raises(ReportError, match="No such file"):
            read(tmp_path / "nothing.json")

    def test_wrong_shape_names_the_place(self, report):
        data = strict_json.encode(report)
        data["variants"][0]["dtypes"] = [{"dtype": 16}]
        with pytest.raises(ReportError, match=r"report\.variants\[0\]\.dtypes\[0\]\.dtype: got 16, but should be a string"):
            parse(data)

    def test_unknown_fields_are_ignored(self, report):
        assert "future" not in parse(strict_json.encode(report) | {"future": 1})


class Elements(html.parser.HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


HOSTILE = "<script>alert(1)</script>'\"|`$x_1$\x1b[31m\u202e\n# {{ 7*7 }} @someone https://x.invalid <!-- -->"


@pytest.fixture(scope="module")
def hostile() -> Report:
    """A report whose every string from outside is markup."""
    found = evidence(9)
    rename = {"triton-tutorial": HOSTILE}
    fields = {"config": HOSTILE, "oracle": HOSTILE, "group": HOSTILE, "case": HOSTILE, "problem": HOSTILE, "bins": (HOSTILE,)}
    finding = Finding(
        oracle=HOSTILE, message=HOSTILE, got=HOSTILE, bound=HOSTILE, where=HOSTILE, count=1, total=2, replay=HOSTILE
    )
    declared = {"support": {HOSTILE: HOSTILE}, "numerics": {HOSTILE: HOSTILE}, "contract": {HOSTILE: [HOSTILE]}}
    names = {"family": HOSTILE, "path": HOSTILE, "configs": (HOSTILE,), "source_hash": HOSTILE, "name": HOSTILE}
    entries = [dataclasses.replace(e, ref=rename.get(e.ref, e.ref), **declared, **names) for e in found.variants]
    verdicts = [dataclasses.replace(v, variant=HOSTILE, dtype=HOSTILE) for v in found.verdicts if v.variant in rename]
    verdicts += [dataclasses.replace(verdicts[0], outcome="fail", finding=finding, seconds={HOSTILE: 1.0}, **fields)]
    return build(
        dataclasses.replace(
            found,
            runs=(
                dataclasses.replace(
                    found.runs[0], run=HOSTILE, profile=HOSTILE, device={"name": HOSTILE}, versions={HOSTILE: HOSTILE}
                ),
            ),
            variants=tuple(entries),
            verdicts=tuple(verdicts),
            unstable=((HOSTILE, HOSTILE),),
            torn=(HOSTILE,),
            not_run=(NotRun(variant=HOSTILE, reason=HOSTILE, dtype=HOSTILE),),
            lost=(Begin(case=HOSTILE, phase="generate", time=0.0),),
        ),
        (HOSTILE + "2",),
    )


class TestEscaping:
    def test_html_has_no_foreign_element(self, hostile):
        page = html_report.render(hostile)
        tags = Elements(page).tags
        assert not {"script", "iframe", "img", "link", "object", "embed", "a"} & {tag for tag, _ in tags}
        assert not [name for _, attributes in tags for name in attributes if name.startswith("on") or name in ("src", "href")]
        assert "<script" not in page
        assert not {"\x1b", "\u202e"} & set(page)

    def test_html_refers_to_nothing_outside(self, report):
        page = html_report.render(report)
        references = [v for _, a in Elements(page).tags for k, v in a.items() if k in ("href", "src", "xlink:href")]
        assert all(reference.startswith("#") for reference in references)
        assert "default-src 'none'" in page
        assert "@import" not in page
        assert not re.findall(r"url\((?!#)", page)

    def test_html_ids_are_unique_where_they_are_referred_to(self, report):
        ids = [a["id"] for _, a in Elements(html_report.render(report)).tags if "id" in a]
        assert len({i for i in ids if ids.count(i) > 1}) == 0

    def test_markdown_has_no_markup_from_outside(self, hostile):
        page = markdown_report.render(hostile)
        prose, fence = [], ""  # GitHub shows fenced blocks and code spans verbatim
        for line in page.splitlines():
            opening = re.match(r"`{3,}", line)
            if opening and not fence:
                fence = opening[0]
            elif fence and line == fence:
                fence = ""
            elif not fence:
                prose.append(re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", line))
        assert not fence
        shown = "\n".join(prose)
        assert "<script" not in shown
        assert not re.search(r"@\w|https?://", shown)
        assert not {"\x1b", "\u202e"} & set(page)

    def test_markdown_tables_keep_their_columns(self, hostile):
        for block in re.findall(r"(?:^\|.*\n)+", markdown_report.render(hostile), re.MULTILINE):
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(counts) == 1

    def test_plots_escape_and_read_no_formulas(self, hostile):
        image = plots.ratio_plot(hostile)
        assert "<script" not in image
        assert "&lt;script&gt;" in image

    def test_terminal_gets_no_escape_sequence(self, report, hostile):
        assert "\x1b" not in render_comparison(compare(report, hostile))


class TestPlots:
    def test_nothing_to_draw(self):
        empty = build(dataclasses.replace(evidence(), verdicts=()), BINS)
        assert plots.ratio_plot(empty) is None
        assert all(plots.error_plot(v, "v") is None for v in empty["variants"])

    def test_exact_and_not_finite_cases_draw(self):
        changes = [{"r_out": 0.0, "max_error": 0.0}, {"r_out": math.inf, "max_error": math.inf}, {"r_out": math.nan}]
        verdicts = tuple(
            verdict("triton-fwd", "float16", 3 * i, measures={"seqlen_kv": 4.0} | c) for i, c in enumerate(changes)
        )
        report = build(dataclasses.replace(evidence(), verdicts=verdicts), BINS)
        assert "<svg" in plots.ratio_plot(report)
        assert plots.error_plot(of(report, "triton-fwd"), "v") is None

    def test_themed_by_the_page(self, report):
        image = plots.ratio_plot(report)
        assert "currentColor" in image
        assert plots._INK not in image
        assert "<?xml" not in image
        assert "metadata" not in image


class TestCompare:
    def test_equal_reports(self, report):
        found = compare(report, report)
        assert not found.regressed
        assert not any((found.worse, found.better, found.stale, found.newly_failing, found.newly_covered))
        assert "no regression" in render_comparison(found)

    def test_worse_and_better(self):
        old, new = (build(evidence(worse=factor), BINS) for factor in (1.0, 1.5))
        there, back = compare(old, new), compare(new, old)
        assert {(c.variant, c.measure) for c in there.worse} >= {("triton-fwd", "r_out"), ("torch-flash", "r_out")}
        assert all(c.ratio == pytest.approx(1.5) for c in there.worse)
        assert [(c.variant, c.dtype) for c in back.better] == [(c.variant, c.dtype) for c in there.worse]
        assert there.regressed
        assert not back.regressed
        assert not compare(old, new, threshold=1.6).worse

    def test_failures_bins_variants_and_sources(self):
        old, found = evidence(), evidence()
        kept = [v for v in found.verdicts if v.outcome == "pass" and v.variant != "torch-flash"]
        kept = [
            dataclasses.replace(v, bins=tuple(b for b in v.bins if b != "gqa")) if v.variant == "triton-fwd" else v
            for v in kept
        ]
        entries = [
            dataclasses.replace(e, source_hash="new") if e.ref == "triton-fwd" else e
            for e in found.variants
            if e.ref != "torch-flash"
        ]
        new = dataclasses.replace(found, verdicts=tuple(kept), variants=(*entries, entry("triton-new")))
        there, back = compare(build(old, BINS), build(new, BINS)), compare(build(new, BINS), build(old, BINS))
        assert there.newly_passing == back.newly_failing == (("triton-tutorial", "bfloat16", "forward"),)
        assert (
            there.newly_uncovered == back.newly_covered == (("triton-fwd", "bfloat16", "gqa"), ("triton-fwd", "float16", "gqa"))
        )
        assert (there.added, there.removed, there.stale) == (("triton-new",), ("torch-flash",), ("triton-fwd",))
        for form in ("text", "markdown"):
            shown = render_comparison(there, form)
            assert "Newly passing" in shown
            assert "stale" in shown

    def test_a_dtype_no_longer_judged(self, report):
        found = evidence()
        fewer = build(dataclasses.replace(found, verdicts=tuple(v for v in found.verdicts if v.dtype != "bfloat16")), BINS)
        assert ("triton-fwd", "bfloat16", "forward") in compare(report, fewer).gone

    def test_not_a_number_is_worse_than_any(self):
        verdicts = {r: (verdict("triton-fwd", "float16", 0, measures={"r_out": r}),) for r in (0.5, math.inf, math.nan)}
        reports = {r: build(dataclasses.replace(evidence(), verdicts=v), BINS) for r, v in verdicts.items()}
        half, infinite, nothing = reports.values()
        assert compare(half, infinite).worse
        assert compare(half, nothing).worse
        assert compare(infinite, nothing).worse
        assert compare(nothing, half).better
        assert not compare(nothing, nothing).worse

    def test_small_values_are_of_no_interest(self):
        small, double = (
            build(dataclasses.replace(evidence(), verdicts=(verdict("triton-fwd", "float16", 0, measures={"r_out": r}),)), BINS)
            for r in (0.003, 0.009)
        )
        assert not compare(small, double).worse

    def test_devices_and_threshold(self, report):
        other = report | {"device": {"slug": "cpu-x86_64"}}
        assert "different devices" in render_comparison(compare(report, other))
        with pytest.raises(ReportError, match="threshold"):
            compare(report, report, threshold=1.0)


def test_worst_cases(report):
    found = worst_cases(report)
    assert found == sorted(found, key=lambda w: (w.variant, found.index(w)))
    assert {(w.variant, w.dtype) for w in found} == {
        *((ref, dtype) for ref in ("torch-flash", "triton-fwd", "triton-tutorial") for dtype in ("float16", "bfloat16")),
        ("ptx-mma", "float16"),
    }
    for worst in found:
        assert worst.case.endswith(worst.problem)
        assert Problem.parse(worst.problem).dtype == worst.dtype
        assert None not in (worst.r_out, worst.r_lse)


def test_code_spans_close():
    assert text.code("a`b``c|d") == "```a`b``c\\|d```"
    assert text.code("`") == "`` ` ``"
