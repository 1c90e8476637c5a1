"""The probes' markdown page and terminal tables, made from the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Column, Table
from rich.text import Text

from verify.arithmetic.instructions import DIVISION, EXP, LOG, TANH
from verify.probes.functions import FUNCTIONS, FunctionProbe
from verify.probes.instructions import INSTRUCTIONS
from verify.probes.matrix import MatrixProbe
from verify.probes.report import ProbeReport

_GOOD, _BAD, _FAILED, _UNKNOWN = "agrees", "DISAGREES", "FAILED", "not in the table"
_MARKS = {_GOOD: "✅ ", _BAD: "❌ ", _FAILED: "❌ ", _UNKNOWN: "⬜ "}
_STYLES = {_GOOD: "green", _BAD: "bold red", _FAILED: "bold red", _UNKNOWN: "yellow"}

Rows = list[tuple[str, ...]]
_MATRIX = (
    "instruction",
    "L",
    "F",
    "p",
    "rounding",
    "C",
    "subnormal operands",
    "experiments",
    "bits",
    "verdict",
)
_FUNCTIONS = (
    "function",
    "inputs",
    "ulp",
    "worst at",
    "of the table's bound",
    "at",
    "monotone",
    "2^n",
    "subnormals",
    "verdict",
)
_ORDERS = ("variant", "config", "dtype", "keys", "order of P V", "first groups of keys")


def verdict(probe: MatrixProbe | FunctionProbe) -> str:
    """The comparison of a probe with its table: "agrees", "DISAGREES", "FAILED" or "not in the
    table"."""
    if not probe.agrees:
        return _BAD
    if probe.error:
        return _FAILED
    return (
        _UNKNOWN
        if isinstance(probe, MatrixProbe) and (probe.guess or probe.agreement is None)
        else _GOOD
    )


def table_entry(probe: MatrixProbe | FunctionProbe, arch: str) -> str:
    """The file and the entry of the table that a probe is compared with, for a correction."""
    if isinstance(probe, MatrixProbe):
        file, arch = "verify/arithmetic/units.py", arch.rstrip("a")
        named = [one for one in INSTRUCTIONS if one.name == probe.name]
        return (
            f"{file}, {arch}: {named[0].operands} into {named[0].accumulator}, {named[0].kind}"
            if named
            else file
        )
    file, tables = (
        "verify/arithmetic/instructions.py",
        {"EXP": EXP, "LOG": LOG, "DIVISION": DIVISION, "TANH": TANH},
    )
    entries = {one.name: one.table for one in FUNCTIONS}
    places = [
        f'{file}: {title}["{key}"]'
        for title, one in tables.items()
        for key in one
        if one[key] is entries.get(probe.name)
    ]
    return places[0] if places else file


def _matrix_row(probe: MatrixProbe) -> tuple[str, ...]:
    quantities = {quantity.name: quantity.measured for quantity in probe.structure}
    names = (
        "products per addition",
        "fraction bits F",
        "output bits p",
        "output rounding",
        "accumulator joins",
    )
    cells = [quantities.get(name, "-") for name in (*names, "subnormal operands")]
    compared = [quantity for quantity in (*probe.structure, *probe.specials) if quantity.expected]
    same = f"{sum(quantity.agrees for quantity in compared)} of {len(compared)}"
    bits = (
        "-"
        if probe.agreement is None
        else f"{probe.agreement.mismatches} of {probe.agreement.dots} differ"
    )
    return (probe.name, *cells, same, bits, verdict(probe))


def _function_row(probe: FunctionProbe) -> tuple[str, ...]:
    worst = (probe.ulp, probe.ratio)
    numbers = [("-", "-") if one is None else (f"{one.value:.6g}", one.at) for one in worst]
    if probe.ulp_bound is not None:
        numbers[0] = (f"{probe.ulp_bound:.6g}", numbers[0][1])
    inputs = f"all {probe.inputs}" if probe.exhaustive else f"{probe.inputs} sampled"
    subnormal = f"in: {probe.subnormal_inputs or '-'}; out: {probe.subnormal_results or '-'}"
    return (
        probe.name,
        inputs,
        *numbers[0],
        *numbers[1],
        probe.order or "-",
        probe.integers or "-",
        subnormal,
        verdict(probe),
    )


def _order_rows(report: ProbeReport) -> Rows:
    rows: Rows = []
    for probe in report.orders:
        groups = " | ".join(probe.groups)
        keys = str(probe.keys or "-")
        rows.append(
            (
                probe.variant,
                probe.config,
                probe.dtype or "-",
                keys,
                probe.reason or probe.order,
                groups,
            )
        )
    return rows


def tables(report: ProbeReport) -> list[Table]:
    """The tables for the terminal; those without rows are left out."""
    shown = []
    for title, columns, rows in (
        ("Matrix instructions", _MATRIX, [_matrix_row(probe) for probe in report.matrix]),
        ("Functions", _FUNCTIONS, [_function_row(probe) for probe in report.functions]),
        ("Summation order", _ORDERS, _order_rows(report)),
    ):
        if rows:
            table = Table(*(Column(name, overflow="fold") for name in columns), title=title)
            for row in rows:
                table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
            shown.append(table)
    return shown


def details(report: ProbeReport) -> Iterator[str]:
    """One line for each disagreement and each failure."""
    for probe in report.matrix:
        entry = table_entry(probe, report.arch)
        for quantity in (*probe.structure, *probe.specials):
            if not quantity.agrees:
                comparison = (
                    f"measured {quantity.measured}, the table's unit gives {quantity.expected}"
                )
                yield f"{probe.name}: {quantity.name}: {comparison}; entry: {entry}"
        if probe.agreement is not None and probe.agreement.mismatches:
            yield f"{probe.name}: {mismatches(probe)}; entry: {entry}"
        if probe.error:
            yield f"{probe.name}: {probe.error}"
    for function in report.functions:
        if function.ratio is not None and not function.agrees:
            comparison = (
                f"{function.ratio.value:.6g} of the table's bound at {function.ratio.at}"
                f" ({function.table})"
            )
            entry = f"entry: {table_entry(function, report.arch)}"
            yield f"{function.name}: {'; '.join(filter(None, (comparison, function.wrong, entry)))}"
        if function.error:
            yield f"{function.name}: {function.error}"


def mismatches(probe: MatrixProbe) -> str:
    """A text with the number of results that differ from the model, and the first of them."""
    agreement = probe.agreement
    assert agreement is not None
    kinds = ", ".join(f"{kind}: {count}" for kind, count in agreement.by_kind.items())
    text = (
        f"{agreement.mismatches} of {agreement.dots} results differ from the model ({kinds}; NaN"
        f" both: {agreement.nan})"
    )
    first = agreement.first
    if first is None:
        return text
    operands = f"a = {' '.join(first.a)}, b = {' '.join(first.b)}, c = {first.c}"
    return (
        f"{text}; the first: {operands}: device {first.device}, model {first.model} ({first.kind})"
    )


def markdown(report: ProbeReport) -> str:
    """The report as a page."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: ProbeReport) -> Iterator[str]:
    name = report.device.get("name", "unknown device")
    yield f"# Probes: {_cell(str(name))}"
    ran = len(report.matrix) + len(report.functions)
    if ran:
        headline = (
            f"{_MARKS[_GOOD]}**Nothing disagrees with the tables.**"
            if report.agrees
            else f"{_MARKS[_BAD]}**DISAGREES**"
        )
        yield f"\n{headline} {ran} probes, arch `{report.arch}`, {report.seconds:.0f} s."
    problems = list(details(report))
    if problems:
        yield "\n## Disagreements and failures\n"
        yield from (f"- ❌ {_cell(line)}" for line in problems)
    if report.matrix:
        yield "\n## Matrix instructions\n"
        yield (
            "L: products per fused addition; F: fraction bits of the alignment; p: of the result."
            " Experiments: how many have"
        )
        yield "the result of the table's unit. Bits: seeded dot products compared with the model.\n"
        yield from _page(_MATRIX, [_matrix_row(probe) for probe in report.matrix])
        for probe in report.matrix:
            yield from _folded(probe)
    if report.functions:
        yield "\n## Functions\n"
        yield (
            "ulp: over normal results; an upper bound, the reference's error included, where all"
            " inputs were tried. Inputs"
        )
        yield "and results are bits.\n"
        yield from _page(_FUNCTIONS, [_function_row(probe) for probe in report.functions])
        yield from _edges(report)
    if report.orders:
        yield "\n## Summation order\n"
        yield from _page(_ORDERS, _order_rows(report))
    if report.not_run:
        yield "\n## Not run\n"
        yield from (
            f"- {_cell(entry.name)}: not run: {_cell(entry.reason)}" for entry in report.not_run
        )


def _folded(probe: MatrixProbe) -> Iterator[str]:
    yield f"\n<details><summary>{_cell(probe.name)}</summary>\n\n{_cell(probe.table)}\n"
    rows = [
        (
            quantity.name,
            quantity.measured,
            quantity.expected or "-",
            _GOOD if quantity.agrees else _BAD,
        )
        for quantity in (*probe.structure, *probe.specials)
    ]
    yield from _page(("quantity", "measured", "the table's unit", ""), rows)
    yield "\n</details>"


def _edges(report: ProbeReport) -> Iterator[str]:
    names = list(dict.fromkeys(name for probe in report.functions for name in probe.edges or {}))
    rows = [
        (probe.name, *(probe.edges.get(name, "-") for name in names))
        for probe in report.functions
        if probe.edges
    ]
    if rows:
        yield "\nResults at the edges, as bits:\n"
        yield from _page(("function", *names), rows)


def _page(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(_MARKS.get(cell, '') + _cell(cell) for cell in row)} |"


def _cell(text: str) -> str:
    """The text escaped for a table cell."""
    return (
        text.replace("\n", " ")
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("*", "\\*")
        .replace("_", "\\_")
    )
