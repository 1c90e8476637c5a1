"""Probes as tables and pages: what was measured, beside what `verify.arithmetic` says."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from verify import document as doc
from verify.arithmetic.instructions import DIVISION, EXP, LOG, TANH
from verify.document import markdown as page
from verify.document import text
from verify.probes import page_orders
from verify.probes.report import (
    MANUAL,
    Compared,
    ConformanceProbe,
    FunctionProbe,
    GradientOrderProbe,
    MatrixProbe,
    ProbeReport,
    Quantity,
    Worst,
)

_GOOD, _BAD, _FAILED, _UNKNOWN = "agrees", "DISAGREES", "FAILED", "not in the table"
_STATUS: dict[str, doc.Status] = {_GOOD: "green", _BAD: "red", _FAILED: "grey", _UNKNOWN: "grey"}
_MATRIX = (
    *("instruction", "products per addition, L", "fraction bits, F", "result bits, p"),
    *("output rounding", "how C is added", "subnormal operands", "experiments as the table"),
    *("sums compared", "that differ", "verdict"),
)
_FUNCTIONS = (
    *("function", "inputs tried", "largest error, ulp", "at input", "the table's bound"),
    *("error / bound", "at input", "monotone", "subnormals", "verdict"),
)
_CONFORMANCE = ("instruction", "arch", "checks", "that differ", "first disagreement", "verdict")
_SHOWN = (
    *("products per addition", "fraction bits F", "output bits p", "output rounding"),
    *("accumulator joins", "subnormal operands"),
)
_FORMATS = {8: "f", 4: "e"}  # by hexadecimal digits, for struct
_NOTE = (
    "L, F, p, rounding and the place of C are revealed by sums whose result decides them, on the"
    " device and on the model with the table's unit. Sums compared: seeded dot products of ten"
    " kinds, bit for bit. Inputs are bits, their value in brackets. An error over all inputs is an"
    " upper bound, the reference's own error included; over sampled inputs it bounds nothing. The"
    " tables count a documented ulp as 2^-23 of the result, and half of one more for exponentials:"
    " an ulp above the documented one may hold. What decides is error / bound: above 1 the table is"
    " wrong."
)
_CONFORMANCE_NOTE = (
    f"Each instruction by itself, against the words and figures of {MANUAL}: registers of all lanes"
    " and shared memory, bit for bit. Of functions, only special values; of matrix instructions,"
    " only which lane holds which element: what they compute stands above."
)


@dataclass(frozen=True)
class Fault:
    """A disagreement, or a probe that failed.  entry: where the table says it, or the instruction's
    function; rows: (quantity, measured, the table's); against: what it is compared with."""

    name: str
    status: doc.Status
    entry: str
    source: str
    rows: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...]
    against: str = "the table"


def document(report: ProbeReport) -> doc.Document:
    """probes.md: every probe, and every experiment of every matrix instruction."""
    found = len(report.compared)
    mark = doc.Mark("green", "pass") if report.agrees else doc.Mark("red", "DISAGREES")
    manual = " or with the PTX manual" if report.conformance else ""
    said = f"Nothing disagrees with the tables{manual}. " if report.agrees else ""
    arch = doc.Span(report.arch, "code")
    about = (mark, f" {said}{found} probes, arch ", arch, f", {report.seconds:.0f} s.")
    lead = (doc.Paragraph(about),) if found else ()
    details = tuple(doc.Folded(probe.name, tuple(_experiments(probe))) for probe in report.matrix)
    parts = (
        ("Disagreements and failures", "faults", boxes(report)),
        ("Probes", "probes", tables(report)),
        ("Experiments", "experiments", (*details, *_edges(report))),
        ("Not run", "not-run", not_run(report)),
    )
    sections = tuple(doc.Section(*part) for part in parts if part[2])
    name = str(report.device.get("name", "unknown device"))
    return doc.Document(f"Probes: {name}", lead, sections)


def markdown(report: ProbeReport) -> str:
    """probes.md."""
    return page.render(document(report), "probes.json")


def tables(report: ProbeReport) -> tuple[doc.Block, ...]:
    """A table each for matrix instructions, functions, conformance and orders, if the probe tried
    any."""
    note = doc.Paragraph(_NOTE, note=True)
    found: list[doc.Block] = [note] if report.matrix or report.functions else []
    notes: dict[Sequence[str], str] = {_CONFORMANCE: _CONFORMANCE_NOTE} | page_orders.NOTES
    for title, table in titled(report):
        found += [doc.Heading(title), table]
        if table.columns in notes:
            found.append(doc.Paragraph(notes[table.columns], note=True))
    return tuple(found)


def titled(report: ProbeReport) -> Iterator[tuple[str, doc.Table]]:
    """The tables that have rows, with their titles."""
    for title, columns, rows in (
        ("Matrix instructions", _MATRIX, tuple(map(_matrix_row, report.matrix))),
        ("Functions", _FUNCTIONS, tuple(map(_function_row, report.functions))),
        ("Conformance", _CONFORMANCE, tuple(_conformance_rows(report))),
        ("Order of summation", page_orders.FORWARD, tuple(page_orders.forward_rows(report))),
        ("Orders of backwards", page_orders.BACKWARD, tuple(page_orders.backward_rows(report))),
    ):
        if rows:
            yield title, doc.Table(columns, rows)


def boxes(report: ProbeReport) -> tuple[doc.Block, ...]:
    """Everything that disagrees, then what failed, with its entry in the tables."""
    return tuple(doc.Boxed(fault.status, tuple(_box(fault))) for fault in faults(report))


def _box(fault: Fault) -> Iterator[doc.Block]:
    red = fault.status == "red"
    words = f"disagrees with {fault.against}" if red else "failed"
    said = doc.Span(words, "bad" if red else "plain")
    yield doc.Paragraph((doc.Span(fault.name, "strong"), " · ", said))
    if fault.rows:
        cells = tuple((name, doc.Span(got, "bad"), want) for name, got, want in fault.rows)
        yield doc.Table(("quantity", "measured", "the table says"), cells)
    for note in fault.notes:
        yield doc.Code(note)
    if red:
        source = f", from {fault.source}." if fault.source else "."
        yield doc.Paragraph(("Entry: ", doc.Span(fault.entry, "code"), source), note=True)


def not_run(report: ProbeReport) -> tuple[doc.Block, ...]:
    """What was not tried, by reason."""
    return doc.left_out((left.name, left.reason) for left in report.not_run)


def details(report: ProbeReport) -> Iterator[str]:
    """A line for everything that disagrees or failed."""
    for fault in faults(report):
        for name, measured, wanted in fault.rows:
            words = f"measured {measured}, the table says {wanted}"
            yield f"{fault.name}: {name}: {words}; entry: {fault.entry}"
        yield from (f"{fault.name}: {note}; entry: {fault.entry}" for note in fault.notes)


def verdict(found: Compared) -> str:
    """How a probe compares with its table, its manual or a declaration: "agrees", "DISAGREES",
    "FAILED" or "not in the table"."""
    if not found.agrees:
        return _BAD
    if found.error:
        return _FAILED
    return (
        _UNKNOWN
        if isinstance(found, MatrixProbe) and (found.guess or found.agreement is None)
        else _GOOD
    )


def table_entry(found: MatrixProbe | FunctionProbe, arch: str) -> str:
    """Where the tables have what a probe is compared with: the file and the entry."""
    from verify.probes.functions import FUNCTIONS  # needs torch, as no other part of a page does
    from verify.probes.instructions import INSTRUCTIONS

    if isinstance(found, MatrixProbe):
        file, arch = "verify/arithmetic/units.py", arch.rstrip("a")
        named = [one for one in INSTRUCTIONS if one.name == found.name]
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
        if one[key] is entries.get(found.name)
    ]
    return places[0] if places else file


def mismatches(probe: MatrixProbe) -> str:
    """How many results differ from the model, and the first of them."""
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


def faults(report: ProbeReport) -> list[Fault]:
    """Everything that disagrees, then what failed."""
    found: list[Fault] = []
    for one in report.matrix:
        if not one.agrees or one.error:
            different = [q for q in (*one.structure, *one.specials) if not q.agrees]
            wrong = one.agreement is not None and one.agreement.mismatches
            rows = [(q.name, q.measured, q.expected) for q in different]
            found.append(_fault(one, report.arch, rows, mismatches(one) if wrong else ""))
    for function in report.functions:
        if not function.agrees or function.error:
            worst, rows = function.ratio, []
            if worst is not None and _beyond(function):
                said = f"{worst.value:.9g} at {_at(function, worst)}"
                rows = [("largest error over the table's bound", said, "at most 1")]
            found.append(_fault(function, report.arch, rows, function.wrong))
    for each in report.conformance:
        if not each.agrees or each.error:
            found.append(_nonconforming(each))
    found += [_out_of_order(sum_) for sum_ in report.gradient_orders if sum_.wrong or sum_.error]
    return sorted(found, key=lambda fault: fault.status != "red")


def _fault(
    one: MatrixProbe | FunctionProbe, arch: str, rows: Sequence[tuple[str, str, str]], wrong: str
) -> Fault:
    notes = tuple(filter(None, (wrong, one.error)))
    status: doc.Status = "grey" if one.agrees else "red"
    return Fault(one.name, status, table_entry(one, arch), one.table, tuple(rows), notes)


def _nonconforming(one: ConformanceProbe) -> Fault:
    from verify.probes.conformance import CONFORMING  # needs torch

    notes = [one.error]
    if one.differing:
        notes.append(f"{one.differing} of {one.checks} trials differ; the first: {one.first}")
    named = [each for each in CONFORMING if each.name == one.name]
    entry = f"kernels/cuda/ptx.cuh: {named[0].function}" if named else "kernels/cuda/ptx.cuh"
    source = f'{MANUAL}, "{named[0].section}"' if named else MANUAL
    status: doc.Status = "grey" if one.agrees else "red"
    said = tuple(filter(None, notes))
    return Fault(one.name, status, entry, source, (), said, "the manual")


def _out_of_order(one: GradientOrderProbe) -> Fault:
    status: doc.Status = "grey" if one.agrees else "red"
    against = f"the declared order, {one.declared}"
    notes = tuple(filter(None, (one.wrong, one.order if one.wrong else "", one.error)))
    entry = "gradients.order of the variant's declaration"
    return Fault(one.name, status, entry, "", (), notes, against)


def _experiments(probe: MatrixProbe) -> Iterator[doc.Block]:
    yield doc.Paragraph(probe.table)
    rows = tuple(
        (q.name, q.measured, q.expected or text.NONE, _mark(_GOOD if q.agrees else _BAD))
        for q in (*probe.structure, *probe.specials)
    )
    yield doc.Table(("quantity", "measured", "the table's unit", ""), rows)


def _edges(report: ProbeReport) -> Iterator[doc.Block]:
    names = list(dict.fromkeys(name for probe in report.functions for name in probe.edges or {}))
    rows = tuple(
        (probe.name, *(probe.edges.get(name, text.NONE) for name in names))
        for probe in report.functions
        if probe.edges
    )
    if rows:
        yield doc.Heading("Results of functions at the edges, as bits")
        yield doc.Table(("function", *names), rows)


def _mark(word: str) -> doc.Mark:
    return doc.Mark(_STATUS[word], word)


def _beside(measured: str, wanted: str) -> doc.Line:
    """A cell; wanted: what the table says, where it says something else."""
    if not wanted:
        return measured
    return doc.Span(measured, "bad"), " ", doc.Span(f"table: {wanted}", "soft")


def _matrix_row(probe: MatrixProbe) -> doc.Row:
    quantities = {quantity.name: quantity for quantity in probe.structure}
    known = [quantity for quantity in (*probe.structure, *probe.specials) if quantity.expected]
    agreed = sum(quantity.agrees for quantity in known)
    every: doc.Line = text.NONE
    if known:
        every = _beside(f"{agreed} of {len(known)}", "all of them" * (agreed < len(known)))
    sums, differ = doc.count(None), doc.count(None)
    if probe.agreement is not None:
        wrong = probe.agreement.mismatches
        sums = doc.count(probe.agreement.dots)
        differ = doc.Number(wrong, text.count(wrong), look="bad" if wrong else "good")
    structure = (_quantity(quantities.get(name)) for name in _SHOWN)
    return (doc.Span(probe.name, "strong"), *structure, every, sums, differ, _mark(verdict(probe)))


def _quantity(quantity: Quantity | None) -> doc.Line:
    if quantity is None:
        return text.NONE
    return _beside(quantity.measured, "" if quantity.agrees else quantity.expected)


def _function_row(probe: FunctionProbe) -> doc.Row:
    tried = f"all {_power(probe.inputs)}" if probe.exhaustive else f"{_power(probe.inputs)} sampled"
    ulp = probe.ulp_bound if probe.ulp_bound is not None else probe.ulp.value if probe.ulp else None
    worst = doc.ratio(probe.ratio.value if probe.ratio else None)
    monotone = _times(probe.order) + (f"; 2^n {probe.integers}" if probe.integers else "")
    fate = [("in", probe.subnormal_inputs), ("out", probe.subnormal_results)]
    said = "; ".join(f"{name}: {word}" for name, word in fate if word and word != "none")
    return (
        *(
            doc.Span(probe.name, "strong"),
            doc.Number(probe.inputs, tried),
            doc.Number(ulp, text.ratio(ulp)),
        ),
        *(_at(probe, probe.ulp), probe.table or text.NONE, worst, _at(probe, probe.ratio)),
        *(monotone, said or text.NONE, _mark(verdict(probe))),
    )


def _conformance_rows(report: ProbeReport) -> Iterator[doc.Row]:
    for one in report.conformance:
        wrong = one.differing
        differ = doc.Number(wrong, text.count(wrong), look="bad" if wrong else "good")
        name = doc.Span(one.name, "strong")
        first = one.first or text.NONE
        counts = doc.count(one.checks or None), differ if one.checks else doc.count(None)
        yield name, report.arch, *counts, first, _mark(verdict(one))


def _beyond(probe: FunctionProbe) -> bool:
    """Whether it is the bound, and not a NaN alone, that does not hold."""
    return not replace(probe, wrong="").agrees


def _times(order: str) -> str:
    """ "yes", or how it is not monotone."""
    if not order:
        return text.NONE
    return {"monotone": "yes", "monotone on either side of 0": "on either side of 0"}.get(
        order, order
    )


def _power(count: int) -> str:
    exact = count > 1 and count & (count - 1) == 0
    return f"2^{count.bit_length() - 1}" if exact else f"{count:,}"


def _at(probe: FunctionProbe, worst: Worst | None) -> str:
    """The input's bits, and its value."""
    if worst is None:
        return text.NONE
    return ", ".join(f"{bits} ({_value(probe.name, bits)})" for bits in worst.at.split(" / "))


def _value(function: str, bits: str) -> str:
    """What those bits are, in fp32, fp16 or bf16."""
    digits = bits + "0000" if "bf16" in function and len(bits) == 4 else bits
    try:
        found = struct.unpack(f">{_FORMATS[len(digits)]}", bytes.fromhex(digits))[0]
    except (KeyError, ValueError):
        return "?"
    return f"{found:.6g}"
