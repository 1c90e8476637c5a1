"""Orders of summation as tables: of forwards, and of backwards beside what they declare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verify import document as doc
from verify.document import text
from verify.probes.report import ProbeReport

FORWARD = (
    *("variant", "config", "dtype", "keys", "order in which P V is added"),
    "first groups of keys",
)
BACKWARD = (
    "sum",
    "config",
    "mask",
    "terms",
    "order in which they are added",
    "declared",
    "verdict",
)
NOTES: dict[Sequence[str], str] = {
    FORWARD: (
        "Revealed through the variant's own entry point, with equal weights for all keys: a fused"
        " group is added at once by one instruction."
    ),
    BACKWARD: (
        "Revealed through the variant's own entry point. Rows and keys count in steps of 16, in"
        " which any order is right; places along the head dim in those of one instruction. S and dP"
        " are asked where each gradient makes them."
    ),
}


def forward_rows(report: ProbeReport) -> Iterator[doc.Row]:
    """Those that were revealed, then those that could not be, with the reason."""
    for one in sorted(report.orders, key=lambda order: bool(order.reason)):
        groups = "  |  ".join(one.groups)
        keys = doc.Number(one.keys or None)
        config = doc.Span(one.config, "code")
        name = doc.Span(one.variant, "strong")
        yield name, config, one.dtype or text.NONE, keys, one.reason or one.order, groups


def backward_rows(report: ProbeReport) -> Iterator[doc.Row]:
    """Those that contradict what is declared, then the others."""
    for one in sorted(report.gradient_orders, key=lambda order: order.agrees):
        name, config = doc.Span(one.name, "strong"), doc.Span(one.config, "code")
        found = one.order or one.wrong or one.error
        mark = (
            doc.Mark("grey", "FAILED")
            if one.error
            else doc.Mark("green", "agrees")
            if one.agrees
            else doc.Mark("red", "DISAGREES")
        )
        terms = doc.Number(one.terms or None)
        yield name, config, one.mask, terms, found, one.declared, mark
