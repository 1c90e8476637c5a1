"""Power: the smallest fault of each class that the campaign would have convicted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from verify.document import Block, Figure, Number, Paragraph, Row, Section, Span, Table, count, text
from verify.report import power_plot
from verify.report.beside import Beside
from verify.report.campaign_schema import PowerReport
from verify.report.power import FAULTS, summary
from verify.report.rival_power import RIVALS
from verify.report.schema import Report

ORDER = 65
PICTURE = "power"
_CAPTION = (
    "Filled: the smallest fault of each class that would have failed, one mark per variant. Hollow:"
    " what the rules of other suites catch, on their own inputs, in an otherwise right kernel."
    " Further left is sharper; a rule without a mark catches no strength up to 1."
)
_BESIDE = (
    "The same with the rules of other suites, on inputs of their own kind: FlashAttention's and"
    " PyTorch's compare with the error of plain torch in the dtype, cuDNN's and Triton's with fixed"
    " tolerances. Columns of this suite: the sharpest and the bluntest variant."
)
_COLUMNS = (
    "variant",
    "dtype",
    "fault",
    "smallest e",
    "assert_close",
    "Triton's tutorial",
    "cases",
    "the case that fails",
)
_NOTE = (
    "What this campaign would have noticed: a fault of that class and at least that strength, of"
    " either sign, leaves an element of the named case out of its bound. Nothing is promised below"
    " it, nor of other classes. Beside it, the strength that a comparison with torch's"
    " assert_close (default tolerances) or with 1e-2 (Triton's tutorial) would need, as the least"
    " over the same cases, with an otherwise exact kernel. docs/power.md derives the numbers."
)


_EXACT = ("counting", "gather", "gather_backward")
_COUNTED = (
    "A fault of a mask or an index has no strength. It fails wherever one of these exact oracles"
    " asks for the key or the row that it takes for another: so many cases, of which none failed."
)


def section(report: Report, beside: Beside) -> Section | None:
    """One row per variant, dtype and class that has a certificate."""
    rows = tuple(map(_row, report.get("power", [])))
    if not rows:
        return None
    blocks: list[Block] = [Paragraph(summary(report) or "")]
    beside_others = tuple(_compared(report))
    if beside_others:
        blocks.append(Figure(PICTURE, _CAPTION, partial(power_plot.power_plot, report)))
        names = ("fault", "dtype", "this suite, least", "largest", *power_plot.RULES)
        blocks += [Paragraph(_BESIDE, note=True), Table(names, beside_others)]
    blocks += [Paragraph(_NOTE, note=True), Table(_COLUMNS, rows)]
    guarantees = tuple(_guarantees(report))
    if guarantees:
        blocks += [Paragraph(_COUNTED, note=True), Table(("variant", "dtype", *_EXACT), guarantees)]
    return Section("Power", "power", tuple(blocks))


def _compared(report: Report) -> Iterator[Row]:
    """One row per class and 16-bit dtype that has a certificate."""
    for fault, words in FAULTS.items():
        for dtype in ("float16", "bfloat16"):
            found = power_plot.strengths(report, dtype)[fault]
            if found:
                rules = (RIVALS[rule][dtype][fault] for rule in power_plot.RULES)
                cells = tuple(text.NONE if e is None else Number(e) for e in rules)
                yield (words, dtype, Number(min(found)), Number(max(found)), *cells)


def _guarantees(report: Report) -> Iterator[Row]:
    """One row per variant and dtype that such an oracle judged; no count of one that failed."""
    for variant in report["variants"]:
        for dtype in variant["dtypes"]:
            judged = [one for one in dtype["oracles"] if one["oracle"] in _EXACT]
            failed = {one["oracle"] for one in judged if one["failures"]}
            counts = {
                name: sum(int(one["cases"]) for one in judged if one["oracle"] == name)
                for name in _EXACT
            }
            if any(cases for name, cases in counts.items() if name not in failed):
                cells = (count(None if n in failed else c or None) for n, c in counts.items())
                yield (Span(variant["ref"], "strong"), dtype["dtype"], *cells)


def _row(one: PowerReport) -> Row:
    return (
        Span(one["variant"], "strong"),
        one["dtype"],
        FAULTS.get(one["fault"], one["fault"]),
        *map(Number, (one["strength"], one["close"], one["tutorial"])),
        count(one["cases"]),
        Span(one["case"], "code"),
    )
