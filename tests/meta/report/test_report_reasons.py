"""Why oracles were not applicable: counted by reason, and shown with the variant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness.fake_campaign import evidence
from tests.harness.rendered import as_html, as_markdown
from verify.evidence import INAPPLICABLE, Verdict
from verify.evidence.strict_json import loads
from verify.report import Report, build, dumps, parse, plots
from verify.report.schema import Oracle

WHY = "needs linear_scores, which softcap <breaks>"


def skipped(verdict: Verdict, why: str) -> Verdict:
    return replace(verdict, outcome=INAPPLICABLE, observed={INAPPLICABLE: why} if why else {})


def oracles(report: Report) -> list[Oracle]:
    return [o for v in report["variants"] for d in v["dtypes"] for o in d["oracles"]]


def test_reasons_are_counted_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "ratio_plot", lambda report: None)
    monkeypatch.setattr(plots, "error_plot", lambda variant, key: None)
    found = evidence(8)
    judged = build(found)
    all_of = found.verdicts
    mine = [v for v in all_of if v.counted and (v.variant, v.oracle) == ("torch-flash", "counting")]
    assert len(mine) >= 3
    whys = {v.case: why for v, why in zip(mine, [WHY, WHY, ""], strict=False)}
    chosen = [v.oracle == "counting" and v.case in whys for v in all_of]
    verdicts = [
        skipped(v, whys[v.case]) if asked else v for v, asked in zip(all_of, chosen, strict=True)
    ]
    report = build(replace(found, verdicts=tuple(verdicts)))
    assert dumps(parse(loads(dumps(report)))) == dumps(report)
    reasons = [o["reasons"] for o in oracles(report) if "reasons" in o]
    assert sum(sum(each.values()) for each in reasons) == 2
    assert {why for each in reasons for why in each} == {WHY}
    assert sum(o["inapplicable"] for o in oracles(report)) == 3
    assert not any("reasons" in o for o in oracles(judged))
    line = "counting: needs linear_scores, which softcap"
    assert line in as_markdown(report)
    assert "softcap &lt;breaks&gt;" in as_html(report)
    assert "Why oracles were not applicable" not in as_markdown(judged)
