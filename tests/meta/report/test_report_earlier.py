"""Reports of schema version 2 are read, and say what they said."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.harness.fake_campaign import BINS, evidence, of
from tests.harness.rendered import as_markdown
from verify.evidence import strict_json
from verify.report import ReportError, build, compare, dumps, parse, replays, statistics


def version_2() -> dict[str, Any]:
    """The report of some evidence as version 2 wrote it."""
    found = evidence()
    data: dict[str, Any] = json.loads(dumps(build(found, BINS)))
    data["schema"] = 2
    for variant in data["variants"]:
        for dtype in variant["dtypes"]:
            for tensor in dtype["tensors"].values():
                worst = tensor["worst"]
                worst["problem"] = worst["case"].rpartition(":")[2]
                worst["replay"] = replays.command(worst)
            of_dtype = [
                v
                for v in found.verdicts
                if (v.variant, v.dtype) == (variant["ref"], dtype["dtype"])
            ]
            for oracle in dtype["oracles"]:
                key = (oracle["group"], oracle["oracle"])
                having = [v for v in of_dtype if v.counted and (v.group, v.oracle) == key]
                held = dict(oracle)
                oracle.clear()
                for name in ("oracle", "group", "cases", "failures", "inapplicable"):
                    oracle[name] = held.get(name, 0)
                oracle["tensors"] = strict_json.encode(statistics.tensors(having))
                for name in ("lse_ulp", "bound_ratio"):
                    oracle[name] = held.get(name)
                if "reasons" in held:
                    oracle["reasons"] = held["reasons"]
    return data


def test_a_report_of_version_2_reads_as_the_same_report() -> None:
    today = build(evidence(), BINS)
    old = parse(version_2())
    assert dumps(old) == dumps(parse(json.loads(dumps(today))))
    assert as_markdown(old) == as_markdown(today)
    assert not compare(old, today).regressed


def test_a_command_that_names_files_is_kept() -> None:
    data = version_2()
    worst = of(data, "triton-fwd")["dtypes"][0]["tensors"]["out"]["worst"]
    worst["replay"] += " --with alibi.py"
    found = of(parse(data), "triton-fwd")["dtypes"][0]["tensors"]["out"]["worst"]
    assert replays.command(found).endswith(" --with alibi.py")


@pytest.mark.parametrize(
    "breaks",
    [
        lambda dtype: dtype["oracles"][0].update(tensors={"out": 3}),
        lambda dtype: dtype["oracles"][0].update(tensors=[]),
        lambda dtype: dtype.update(oracles={}),
        lambda dtype: dtype.update(tensors=[]),
        lambda dtype: dtype["tensors"].update(out={"worst": 1}),
    ],
    ids=["an r", "tensors of an oracle", "oracles", "tensors", "a worst case"],
)
def test_what_has_another_shape_is_refused_by_its_place(breaks: Any) -> None:
    data = copy.deepcopy(version_2())
    breaks(of(data, "triton-fwd")["dtypes"][0])
    with pytest.raises(ReportError, match=r"report\.variants\[\d\]\.dtypes\[0\]"):
        parse(data)
