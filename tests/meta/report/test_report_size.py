"""What a report takes on disk: pictures and report.json are small, and show and hold the same."""

import json
import re

import pytest

from tests.harness.fake_campaign import BINS, evidence
from verify.evidence.strict_json import encode, loads
from verify.report import build, dumps, parse, plots, statistics, svg

PLACES = [(10.04, 20.06), (10.04, 20.06), (310.123456, 4.5), (0.0, 499.999999), (7.25, 8.75)]
STYLE = "fill: #0072b2; fill-opacity: 0.6"


@pytest.fixture(scope="module")
def report():
    return build(evidence(24), BINS)


def marks(places, shape="v-m1", style=STYLE):
    """Marks of a series as matplotlib writes them."""
    return "".join(
        f'<use xlink:href="#{shape}" x="{x:.6f}" y="{y:.6f}" style="{style}"/>\n' for x, y in places
    )


def vertices(picture):
    """Absolute vertices of every path that shows markers, in the order of the picture."""
    found = []
    for start, steps in re.findall(r'<path d="M([^l"]*)l([^"]*)" fill="none" marker', picture):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", f"{start} {steps}")]
        x = y = 0.0
        places = []
        for dx, dy in zip(numbers[::2], numbers[1::2], strict=True):
            x, y = x + dx, y + dy
            places.append((x, y))
        found.append(places)
    return found


class TestPictures:
    def test_a_series_is_one_path_through_the_same_places(self):
        picture = svg.compact(f"<g>\n{marks(PLACES)}</g>\n", "v")
        ((*found,),) = vertices(picture)
        assert len(found) == len(PLACES)
        for (x, y), (there, below) in zip(PLACES, found, strict=True):
            assert abs(x - there) < 0.051
            assert abs(y - below) < 0.051
        assert picture.count("<use") == 1  # the mark itself
        assert re.search(rf'<marker id="v-s0"[^>]*><use [^>]*style="{STYLE}"/></marker>', picture)
        assert all(f'marker-{at}="url(#v-s0)"' in picture for at in ("start", "mid", "end"))

    def test_series_that_look_different_stay_apart(self):
        other = marks(PLACES[:3], style="fill: #d55e00")
        picture = svg.compact(marks(PLACES) + other + marks(PLACES[1:], "v-m2"), "v")
        assert [len(found) for found in vertices(picture)] == [5, 3, 4]
        assert re.findall(r'<marker id="([^"]*)"', picture) == ["v-s0", "v-s1", "v-s2"]

    def test_few_marks_and_ticks_stay_as_they_are(self):
        picture = svg.compact(marks(PLACES[2:4]), "v")
        assert vertices(picture) == []
        assert '<use xlink:href="#v-m1" x="310.12" y="4.5" class="v-0"/>' in picture

    def test_coordinates_and_styles_are_short(self):
        line = '<path d="M 1.500000 -0.300000 \nL 0.004 12.126 \nz\n" style="stroke: red"/>\n'
        text = '<text style="stroke: red" x="3.0" transform="rotate(-0 3.0 4.0)">5.000</text>\n'
        picture = svg.compact(f'<g id="v-axes_1">\n{line}{text}</g>\n', "v")
        assert '<path d="M1.5 -.3L0 12.13z" class="v-0"/>' in picture
        assert '<text class="v-0" x="3">5.000</text>' in picture
        assert ".v-0{stroke:red}" in picture
        assert "<g" not in picture
        kept = '<g clip-path="a"><g>x</g></g>'
        assert svg.compact(kept, "v").endswith('<g clip-path="a">x</g>')

    def test_text_is_never_taken_for_markup(self):
        text = 'style="stroke: red" d="M 1.500000 2.0" id="x"'
        picture = svg.compact(f"<text>{text}</text><text>{text}</text>", "v")
        assert picture.count(f"<text>{text}</text>") == 2

    def test_every_case_is_drawn(self, report):
        picture = plots.ratio_plot(report)
        assert all(
            len(samples) <= statistics.MAX_SAMPLES
            for v in report["variants"]
            for d in v["dtypes"]
            for samples in d["samples"].values()
        )
        drawn = sum(
            len([s for s in samples if s["r"] is not None])
            for v in report["variants"]
            for d in v["dtypes"]
            for name, samples in d["samples"].items()
            if name != "lse" and len(samples) >= 3
        )
        assert sum(map(len, vertices(picture))) == drawn > 100

    def test_ids_and_classes_of_two_pictures_differ(self, report):
        variant = next(v for v in report["variants"] if v["ref"] == "triton-fwd")
        pictures = [plots.error_plot(variant, key) for key in ("v1", "v2")]
        names = [
            set(re.findall(r'(?:id|class)="([^"]*)"', one)) | set(re.findall(r"\.(v\S+)\{", one))
            for one in pictures
        ]
        assert all(names)
        assert not names[0] & names[1]

    def test_a_case_more_costs_few_bytes(self):
        sizes = []
        for cases in (8, 24):
            found = build(evidence(cases), BINS)
            drawn = sum(
                len(samples)
                for v in found["variants"]
                for d in v["dtypes"]
                for samples in d["samples"].values()
            )
            sizes.append((len(plots.ratio_plot(found)), drawn))
        (small, few), (large, many) = sizes
        assert many > 2 * few
        assert large - small < 14 * (many - few)  # an element for each takes 140


class TestJson:
    def test_numbers_and_rows_have_no_blanks_beside_them(self, report):
        page = dumps(report)
        assert re.search(r'\{"seqlen_kv":\d', page)
        rows = [line for line in page.splitlines() if line.lstrip().startswith('"oracles":')]
        assert len(rows) > 1
        assert sum(line.count('{"oracle":') for line in rows) > 10
        rows = [line.replace('"oracles": [', "") for line in rows]
        assert not [line for line in rows if re.search(r'": |, "', line)]
        assert max(map(len, page.splitlines())) < len(page) / 10  # a diff shows what changed

    @pytest.mark.parametrize("form", [{"indent": 1}, {}, {"separators": (",", ":")}])
    def test_other_spacing_reads_the_same(self, report, form):
        old = json.dumps(encode(report), **form)
        assert dumps(parse(loads(old))) == dumps(report)


def test_counts_of_0_are_not_in_the_file_and_are_read_back(report):
    text = dumps(report)
    dtypes = [d for v in loads(text)["variants"] for d in v["dtypes"]]
    counts = [one.get("inapplicable") for d in dtypes for one in d["oracles"]]
    assert None in counts
    assert 0 not in counts
    again = parse(loads(text))
    for variant, made in zip(again["variants"], report["variants"], strict=True):
        for dtype, original in zip(variant["dtypes"], made["dtypes"], strict=True):
            assert str(dtype["groups"]) == str(original["groups"])
            for one, origin in zip(dtype["oracles"], original["oracles"], strict=True):
                names = ("cases", "failures", "inapplicable")
                assert [one[name] for name in names] == [origin[name] for name in names]
