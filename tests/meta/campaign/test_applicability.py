"""The committed table says which oracle judges which variant, and every oracle is explained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.fake_trials import DECLARED
from verify.campaign import applicability
from verify.cell.discovery import roster
from verify.oracles import oracles
from verify.variant import Numerics

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture(scope="module")
def table() -> str:
    return applicability.table(roster().declarations)


def test_the_committed_table_is_current(table: str) -> None:
    committed = applicability.PATH.read_text(encoding="utf-8")
    assert table == committed, f"write it again with `{applicability.COMMAND}`"


def test_every_oracle_is_explained() -> None:
    text = (DOCS / "oracles.md").read_text(encoding="utf-8")
    for name in {oracle.name for oracle in oracles()}:
        assert f"\n### {name}\n" in text, f"docs/oracles.md does not explain {name}"
    assert {line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")} == {
        o.name for o in oracles()
    }


def test_what_is_left_out_has_its_reason() -> None:
    by_name = {(oracle.name, oracle.group): oracle for oracle in oracles()}
    merging = replace(DECLARED, ref="merging", numerics=Numerics(split_keys=True))
    assert applicability.reason(DECLARED, by_name["dyadic", "dyadic"]) is None
    assert (
        applicability.reason(merging, by_name["dyadic", "dyadic"])
        == "merges parts by a rounded LSE"
    )
    assert (
        applicability.reason(DECLARED, by_name["gradient_sums", "gradients"])
        == "has no backward of its own"
    )
    found = applicability.table([merging, DECLARED])
    assert "| dyadic | dyadic | x |  |" in found
    assert "- dyadic, 2: merges parts by a rounded LSE." in found
    assert "1. accused\n2. merging\n" in found
    assert "no backward of its own" not in found
    assert applicability._numbers([1, 2, 3, 5, 7, 8]) == "1-3, 5, 7-8"
