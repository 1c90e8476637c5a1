"""The contract matrix: words of all dtypes and configs in one cell, contradictions marked, nothing
from a kernel unescaped."""

from __future__ import annotations

from verify.evidence import Phase, Verdict
from verify.report import contract


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
    assert contract.columns(found) == ["good", "bad|one"]
    by_name = dict(contract.rows(found))
    assert by_name["LSE"][0] == ("natural", "", False)
    assert by_name["LSE"][1] == ("natural (bfloat16); base <2> (float16)", "natural", True)
    assert by_name["P"][0] == ("bfloat16; float16", "", False)


def test_it_is_rendered_escaped_and_contradictions_show() -> None:
    lines = "\n".join(contract.markdown(matrix()))
    assert "❌ **natural" in lines
    assert "declared: natural" in lines
    assert "| **P** |" in lines
    assert len({line.count(" | ") for line in lines.splitlines() if line.startswith("| **")}) == 1
    page = contract.html(matrix())
    assert "base &lt;2&gt;" in page
    assert page.count('class="bad"') == 1
    assert '<span class="wanted">declared: natural</span>' in page
    assert "<2>" not in page


def test_nothing_measured_is_no_section() -> None:
    assert list(contract.markdown({"a": {}})) == []
    assert contract.html({}) == ""
