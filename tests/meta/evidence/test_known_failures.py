"""Known defects: what a file of them says, which it excuses, and that it excuses no other."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from msgspec import structs

from tests.harness.commands import verify
from tests.harness.fake_campaign import DEVICE, evidence, of
from tests.harness.rendered import as_html, as_markdown
from verify.cell.process import ROOT
from verify.evidence import load
from verify.evidence.known_failures import (
    Xfail,
    Xfails,
    XfailsError,
    at_start,
    changed_since,
    digest,
    handed_on,
    xfails_for,
    xfails_of,
)
from verify.evidence.strict_json import loads
from verify.report import build, parse, read
from verify.report.json_file import dumps

TODAY = date(2026, 11, 21)
ENTRY = """
[[xfail]]
cases = "library:.*skv=(64|192),(?!.*mask=).*"
link = "docs/findings.md, 14"
expires = 2026-12-31
witness = "library:default:gradients:sq=64,skv=64,d=16,dtype=float16"
"""


def written(folder: Path, text: str = ENTRY) -> Path:
    path = folder / "xfails.toml"
    path.write_text(text)
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    (entry,) = xfails_of(written(tmp_path, ENTRY + 'oracles = ["bound"]\n'), "any", TODAY).entries
    assert (entry.link, entry.expires, entry.oracles, entry.device) == (
        "docs/findings.md, 14",
        date(2026, 12, 31),
        ("bound",),
        "*",
    )
    assert entry.told == "docs/findings.md, 14, expected until 2026-12-31"
    assert xfails_of(tmp_path / "none.toml", "any", TODAY) == Xfails()


@pytest.mark.parametrize(
    ("device", "day", "counts"),
    [
        ("NVIDIA H100 80GB HBM3", TODAY, True),
        ("NVIDIA H100 80GB HBM3", date(2026, 12, 31), True),
        ("NVIDIA H100 80GB HBM3", date(2027, 1, 1), False),
        ("NVIDIA A100", TODAY, False),
    ],
)
def test_an_entry_counts_on_its_device_until_its_last_day(
    tmp_path: Path, device: str, day: date, counts: bool
) -> None:
    path = written(tmp_path, ENTRY + 'device = "NVIDIA H100*"\n')
    assert bool(xfails_of(path, device, day).entries) is counts


def test_the_day_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert xfails_for(DEVICE, "20261231T235959Z").entries
    assert xfails_for(DEVICE, "2026-12-31T23:59:59+00:00").entries
    assert not xfails_for(DEVICE, "20270101T000000Z").entries


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[xfail]", "xfails.toml: "),
        ("[xfails]", "holds nothing but"),
        ("[xfail]", "holds nothing but"),
        (
            ENTRY.replace("link =", "where ="),
            "xfail 1: Object contains unknown field `where` (its fields: cases, link, expires",
        ),
        (ENTRY.replace('link = "docs/findings.md, 14"', ""), "xfail 1.link: is missing"),
        (ENTRY.replace("2026-12-31", '"soon"'), "xfail 1.expires: Expected `date`, got `str`"),
        (
            ENTRY.replace("2026-12-31", "2026-12-31T00:00:00"),
            "expires: Expected `date`, got `datetime`",
        ),
        (ENTRY.replace("(64|192)", "(64|192"), "cases is no regular expression"),
        (ENTRY.replace("skv=64,d", "skv=65,d"), "its witness is none of its cases"),
        (
            ENTRY + ENTRY.replace("cases =", "case ="),
            "xfail 2: Object contains unknown field `case`",
        ),
        ("xfail = [1]", "xfail 1: Expected `object`, got `int` (its fields: cases, link"),
        ("xfail = [[1]]", "xfail 1: Expected `object`, got `array`"),
        ("xfail = 1", "holds nothing but"),
        (ENTRY + "cases = 1", "Cannot overwrite a value"),
        (ENTRY + 'oracles = "bound"', "xfail 1.oracles: Expected `array`, got `str`"),
        (ENTRY + "oracles = [1]", "xfail 1.oracles[0]: Expected `str`, got `int`"),
        (ENTRY + "device = 1", "xfail 1.device: Expected `str`, got `int`"),
        (ENTRY.replace("2026-12-31", '"2026-12-31"'), "expires: Expected `date`, got `str`"),
        (ENTRY + '"a\\n\\u001b' + "x" * 500 + '" = 1', "unknown field `a\\n\\x1bxx"),
        (ENTRY.replace("(64|192)", "a{99999999999999999999}"), "cases is no regular expression"),
        (ENTRY.replace("(64|192)", "(" * 5000 + ")" * 5000), "cases is no regular expression"),
        ("xfail = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        (ENTRY + "#" * 100_000, "are more than 100000"),
        (ENTRY + "x\x00 = 1", "xfails.toml: "),
    ],
    ids=lambda value: value[-30:],
)
def test_a_file_that_says_too_little_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(XfailsError) as refusal:
        xfails_of(written(tmp_path, text), "any", TODAY)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "xfails.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(XfailsError, match="can't decode"):
        xfails_of(path, "any", TODAY)


def test_the_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert at_start() == ""
    written(tmp_path)  # as a kernel might, when it is loaded
    assert at_start() == ""
    assert xfails_for(DEVICE, "20261121T000000Z") == Xfails()
    assert changed_since()
    assert handed_on() == {"VERIFY_XFAILS_TEXT": ""}
    assert digest("") == "none"


def test_a_process_takes_what_it_was_handed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERIFY_XFAILS_TEXT", ENTRY)
    assert at_start() == ENTRY
    assert "VERIFY_XFAILS_TEXT" not in os.environ  # no kernel inherits it
    (entry,) = xfails_for(DEVICE, "20261121T000000Z").entries
    assert entry.link == "docs/findings.md, 14"


def test_only_what_is_described_is_expected(tmp_path: Path) -> None:
    xfails = xfails_of(written(tmp_path), "any", TODAY)
    (entry,) = xfails.entries
    failed = replace(
        evidence().verdicts[0], outcome="fail", case=entry.witness, oracle="gradient_bound"
    )
    assert xfails.expecting(failed) == entry
    assert xfails.expecting(replace(failed, outcome="pass")) is None
    other = [
        failed.case.replace("skv=64", "skv=128"),
        failed.case.replace("dtype", "mask=causal,dtype"),
        "another-" + failed.case,
        failed.case.replace("library", "library2"),
    ]
    assert xfails.unexpected([failed, *(replace(failed, case=case) for case in other)]) == [
        replace(failed, case=case) for case in other
    ]
    narrow = Xfails((structs.replace(entry, oracles=("gradient_sums",)),))
    assert narrow.expecting(failed) is None
    assert narrow.expecting(replace(failed, oracle="gradient_sums")) is not None
    assert (xfails.shown_by(entry.witness), xfails.shown_by(other[0])) == (entry, None)


def test_a_report_tells_what_is_known_apart_from_what_is_news() -> None:
    found = evidence(8)
    ref = found.verdicts[0].variant
    small, large = (
        replace(found.verdicts[0], outcome="fail", case=f"{ref}:c:accuracy:{name}", problem=name)
        for name in ("sq=2,skv=2,d=16,dtype=float16", "sq=64,skv=64,d=64,dtype=float16")
    )
    entry = Xfail(
        cases=small.case, link="a link <there>", expires=date(2100, 1, 1), witness=small.case
    )
    judged = replace(found, verdicts=(small, large))
    plain, told = build(judged, ()), build(judged, (), Xfails((entry,)))
    (failure,) = of(plain, ref)["failing"]
    assert (failure["case"], failure["cases"], "known" in failure) == (small.case, 2, False)
    news, known = of(told, ref)["failing"]
    assert (news["case"], news["cases"], "known" in news) == (large.case, 1, False)
    assert (known["case"], known["known"]) == (small.case, entry.told)
    assert told["status"] == of(told, ref)["status"] == "red"
    assert parse(loads(dumps(told))) == told
    assert (
        "a known defect: a link &lt;there&gt;, expected until 2100-01-01" in as_html(told).lower()
    )
    assert as_markdown(told).count("A known defect: a link") == 1


def test_the_collection_expects_of_cudnn_what_is_told_of_it() -> None:
    (entry,) = xfails_of(ROOT / "xfails.toml", "NVIDIA H100 80GB HBM3", TODAY).entries
    assert xfails_of(ROOT / "xfails.toml", "cpu", TODAY) == Xfails()
    report = read(ROOT / "reports" / "nvidia-h100-80gb-hbm3")
    failing = [failure["case"] for variant in report["variants"] for failure in variant["failing"]]
    assert all(re.fullmatch(entry.cases, case) for case in failing)
    case = "torch-cudnn-backward:default:gradient_slice:b=2,sq=7,skv={},d=64,dtype=bfloat16{}"
    expected = [
        n for n in range(1, 4200) if re.fullmatch(entry.cases, case.format(n, ",dist=jumps"))
    ]
    assert expected == list(range(64, 4200, 128))
    assert not re.fullmatch(entry.cases, case.format(64, ",mask=causal.tl,dist=negative_lse"))
    assert re.fullmatch(entry.cases, case.format(64, ""))


KERNEL = """
import torch

DTYPES, HEAD_DIMS = ("float32",), (32,)


def attention(q, k, v):
    out = torch.softmax((q @ k.mT) * q.shape[-1] ** -0.5, dim=-1) @ v
    return out * 1.25 if k.shape[2] in FAULTY else out
"""
KNOWN = """
[[xfail]]
cases = "plain.py@plain:.*skv=2,.*"
link = "somewhere"
expires = 2100-01-01
witness = "plain.py@plain:default:accuracy:sq=2,skv=2,d=32,dtype=float32"
"""


WRITES = """
from pathlib import Path

Path("xfails.toml").write_text({known!r})
"""


@pytest.mark.first_look(2)
@pytest.mark.parametrize(
    ("faulty", "status", "said"),
    [
        ("(2,)", 3, "known defect: somewhere, expected until 2100-01-01"),  # -k: not all was judged
        ("range(2, 999)", 1, "out is off by"),
        ("writes its own", 1, "xfails.toml has changed while this command ran"),
        ("nonsense", 2, "verify: xfails.toml: xfail 1: Expected `object`, got `int`"),
    ],
    ids=["known", "news", "writes", "nonsense"],
)
def test_a_command_fails_for_news_alone(
    tmp_path: Path, faulty: str, status: int, said: str
) -> None:
    text = KERNEL.replace("FAULTY", faulty)
    if faulty == "writes its own":
        every = KNOWN.replace("plain.py@plain:.*skv=2,.*", ".*")
        text = WRITES.format(known=every) + KERNEL.replace("FAULTY", "range(2, 999)")
    else:
        written(tmp_path, KNOWN if faulty != "nonsense" else "xfail = [1]")
    (tmp_path / "plain.py").write_text(text)
    words = [
        "run",
        "-n",
        "0",
        "--examples",
        "8",
        "--seed",
        "1",
        "-k",
        "(within and float32) or worst",
        "plain.py",
    ]
    # A confined kernel could not write the file at all.
    variables = {"VERIFY_SHRINK_SECONDS": "0", "VERIFY_CONFINE": "0"}
    done = verify(*words, cwd=tmp_path, variables=variables)
    assert done.returncode == status, done.stdout
    assert said in " ".join(done.stdout.split())
    if faulty == "(2,)":
        (run,) = load(next((tmp_path / ".verify" / "runs").iterdir())).runs
        assert run.versions["xfails"] == digest(KNOWN)
