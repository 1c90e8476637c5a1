"""The contract matrix: words of all dtypes and configs in one cell, contradictions marked, nothing
from a kernel unescaped."""

from __future__ import annotations

from typing import Any

from verify.document import Document, html, markdown
from verify.evidence import Phase, Verdict
from verify.report import contract
from verify.report.beside import Beside
from verify.report.sections import contract as section


def verdict(
    dtype: str,
    observed: dict[str, str],
    *,
    oracle: str = "contract",
    phase: Phase = "generate",
    number: int = 0,
) -> Verdict:
    return Verdict(
        case=f"a:default:{oracle}:{dtype}{number}",
        variant="a",
        config="default",
        dtype=dtype,
        oracle=oracle,
        group=oracle,
        outcome="pass",
        phase=phase,
        problem=f"{dtype}{number}",
        observed=observed,
    )


def matrix() -> dict[str, dict[str, contract.Cell]]:
    good = contract.cells(
        [
            verdict("float16", {"LSE": "natural", "LSE:declared": "natural"}),
            verdict("bfloat16", {"LSE": "natural", "LSE:declared": "natural"}),
            verdict(
                "float16", {"P": "float16", "P:declared": "float16"}, oracle="declared_numerics"
            ),
            verdict(
                "bfloat16", {"P": "bfloat16", "P:declared": "bfloat16"}, oracle="declared_numerics"
            ),
            verdict("bfloat16", {"LSE": "shrunk"}, phase="shrink", number=1),
            verdict("bfloat16", {"key": "another oracle's"}, oracle="bound"),
        ]
    )
    wrong = {
        "LSE": "base <2>",
        "LSE:declared": "natural",
        "LSE:contradicts": "a row has 3, would be 2",
    }
    bad = contract.cells(
        [
            verdict("float16", wrong),
            verdict("bfloat16", {"LSE": "natural", "LSE:declared": "natural"}),
        ]
    )
    return {"good": good, "not run": {}, "bad|one": bad}


def test_a_cell_holds_the_words_of_all_dtypes() -> None:
    found = matrix()
    assert list(found["good"]) == ["LSE", "P"]
    assert found["good"]["P"]["measured"] == {"bfloat16": ["bfloat16"], "float16": ["float16"]}
    assert section.columns(found) == ["good", "bad|one"]
    by_name = dict(section.rows(found))
    assert by_name["LSE"][0] == ("natural", "", False)
    assert by_name["LSE"][1] == ("natural (bfloat16); base <2> (float16)", "natural", True)
    assert by_name["P"][0] == ("bfloat16; float16", "", False)


def reported(measured: dict[str, dict[str, contract.Cell]]) -> Any:
    """What the section reads of a report."""
    variants = [
        {"ref": ref, "measured": found, "cases": 1, "status": "green"}
        for ref, found in measured.items()
    ]
    return {"variants": variants}


def test_it_is_rendered_escaped_and_contradictions_show() -> None:
    shown = section.section(reported(matrix()), Beside())
    assert shown is not None
    page = Document("", (), (shown,))
    lines = markdown.render(page)
    assert "**natural (bfloat16); base &#60;2&#62; (float16)**" in lines
    assert "declared: natural" in lines
    assert "| **P** |" in lines
    assert len({line.count(" | ") for line in lines.splitlines() if line.startswith("| **")}) == 1
    body = html.render(page)
    assert "base &lt;2&gt;" in body
    assert body.count('class="bad"') == 1
    assert '<span class="soft">[declared: natural]</span>' in body
    assert "<2>" not in body


def test_nothing_measured_is_no_section() -> None:
    assert section.section(reported({"a": {}}), Beside()) is None
    assert section.section(reported({}), Beside()) is None
