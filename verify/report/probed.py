"""The device's probes, `probes.json`, as a section of the report: what was measured, beside what
the tables say."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from verify.report import text
from verify.report.schema import BesideReport, Status

if TYPE_CHECKING:
    from verify.probes.functions import FunctionProbe, Worst
    from verify.probes.matrix import MatrixProbe, Quantity
    from verify.probes.report import ProbeReport

MATRIX_COLUMNS = (
    *(
        "instruction",
        "products per addition, L",
        "fraction bits, F",
        "result bits, p",
        "output rounding",
        "how C is added",
    ),
    *("subnormal operands", "experiments as the table", "sums compared", "that differ", "verdict"),
)
FUNCTION_COLUMNS = (
    *(
        "function",
        "inputs tried",
        "largest error, ulp",
        "at input",
        "the table's bound",
        "error / bound",
        "at input",
    ),
    *("monotone", "subnormals", "verdict"),
)
ORDER_COLUMNS = (
    "variant",
    "config",
    "dtype",
    "keys",
    "order in which P V is added",
    "first groups of keys",
)
NOTE = (
    "L, F, p, rounding and the place of C are revealed by sums whose result decides them, on the"
    " device and on the model with the table's unit. Sums compared: seeded dot products of ten"
    " kinds, bit for bit. Inputs are bits, their value in brackets. An error over all inputs is an"
    " upper bound, the reference's own error included; over sampled inputs it bounds nothing. The"
    " tables count a documented ulp as 2^-23 of the result, and half of one more for exponentials:"
    " an ulp above the documented one may hold. What decides is error / bound: above 1 the table is"
    " wrong."
)
_SHOWN = (
    *(
        "products per addition",
        "fraction bits F",
        "output bits p",
        "output rounding",
        "accumulator joins",
    ),
    "subnormal operands",
)
_STATUS: dict[str, Status] = {
    "agrees": "green",
    "DISAGREES": "red",
    "FAILED": "grey",
    "not in the table": "grey",
}
_FORMATS = {8: "f", 4: "e"}  # by hexadecimal digits, for struct


@dataclass(frozen=True)
class Shown:
    """One cell.  wanted: what the table says, where it says something else."""

    said: str
    wanted: str = ""


@dataclass(frozen=True)
class Row:
    """One probe.  cells: under the columns between its name and its verdict."""

    name: str
    cells: tuple[Shown, ...]
    verdict: str
    status: Status


@dataclass(frozen=True)
class ProbeFault:
    """A disagreement, or a probe that failed.  entry: where the table says it; rows: (quantity,
    measured, the table's)."""

    name: str
    status: Status
    entry: str
    source: str
    rows: list[tuple[str, str, str]]
    notes: list[str]


def ran(probes: ProbeReport) -> int:
    """How many probes were tried that have something to agree with."""
    return len(probes.matrix) + len(probes.functions)


def entry(probes: ProbeReport) -> BesideReport:
    """Its status and one line: red if anything disagrees with the tables, grey if a probe
    failed."""
    found: list[MatrixProbe | FunctionProbe] = [*probes.matrix, *probes.functions]
    wrong = [probe.name for probe in found if not probe.agrees]
    failed = [name for name in probes.failed if name not in wrong]
    about = f"{ran(probes)} probes on {probes.arch or 'an unknown arch'}"
    if wrong:
        said = (
            f"{len(wrong)} of {about} disagree with the tables that the bounds rely on:"
            f" {', '.join(wrong)}."
        )
    elif failed:
        said = (
            f"{len(failed)} of {about} failed: {', '.join(failed)}; the others agree with the"
            " tables."
        )
    else:
        said = f"{about}: nothing disagrees with the tables that the bounds rely on."
    if guessed := [probe.name for probe in probes.matrix if probe.guess]:
        said += f" {len(guessed)} are not in the tables."
    return {
        "name": "probes",
        "status": "red" if wrong else "grey" if failed else "green",
        "said": said,
    }


def faults(probes: ProbeReport) -> list[ProbeFault]:
    """Everything that disagrees, then what failed."""
    from verify.probes import rendering

    found: list[ProbeFault] = []
    for one in probes.matrix:
        if not one.agrees or one.error:
            different = [q for q in (*one.structure, *one.specials) if not q.agrees]
            notes = (
                [rendering.mismatches(one)]
                if one.agreement is not None and one.agreement.mismatches
                else []
            )
            triples = [(q.name, q.measured, q.expected) for q in different]
            found.append(_fault(one, rendering.table_entry(one, probes.arch), triples, notes))
    for function in probes.functions:
        if not function.agrees or function.error:
            ratio, triples = function.ratio, []
            if ratio is not None and _beyond(function):
                triples = [
                    (
                        "largest error over the table's bound",
                        f"{ratio.value:.9g} at {_at(function, ratio)}",
                        "at most 1",
                    )
                ]
            notes = [function.wrong] if function.wrong else []
            found.append(
                _fault(function, rendering.table_entry(function, probes.arch), triples, notes)
            )
    return sorted(found, key=lambda fault: fault.status != "red")


def _fault(
    one: MatrixProbe | FunctionProbe,
    entry: str,
    triples: list[tuple[str, str, str]],
    notes: list[str],
) -> ProbeFault:
    errors = [one.error] if one.error else []
    return ProbeFault(
        one.name, "grey" if one.agrees else "red", entry, one.table, triples, notes + errors
    )


def matrix_rows(probes: ProbeReport) -> list[Row]:
    """One row per matrix instruction."""
    return [_matrix_row(probe) for probe in probes.matrix]


def _matrix_row(probe: MatrixProbe) -> Row:
    quantities = {quantity.name: quantity for quantity in probe.structure}
    known = [quantity for quantity in (*probe.structure, *probe.specials) if quantity.expected]
    agreed = sum(quantity.agrees for quantity in known)
    every = (
        Shown(f"{agreed} of {len(known)}", "all of them" if agreed < len(known) else "")
        if known
        else Shown(text.NONE)
    )
    sums, differ = Shown(text.NONE), Shown(text.NONE)
    if probe.agreement is not None:
        sums, differ = (
            Shown(text.count(probe.agreement.dots)),
            Shown(text.count(probe.agreement.mismatches)),
        )
        differ = Shown(differ.said, "0") if probe.agreement.mismatches else differ
    return _row(probe, (*(_quantity(quantities.get(name)) for name in _SHOWN), every, sums, differ))


def _quantity(quantity: Quantity | None) -> Shown:
    if quantity is None:
        return Shown(text.NONE)
    return Shown(quantity.measured, "" if quantity.agrees else quantity.expected)


def function_rows(probes: ProbeReport) -> list[Row]:
    """One row per function."""
    return [_function_row(probe) for probe in probes.functions]


def _function_row(probe: FunctionProbe) -> Row:
    tried = f"all {_power(probe.inputs)}" if probe.exhaustive else f"{_power(probe.inputs)} sampled"
    ulp = probe.ulp_bound if probe.ulp_bound is not None else probe.ulp.value if probe.ulp else None
    ratio = probe.ratio
    cells = [
        Shown(tried),
        Shown(text.ratio(ulp)),
        Shown(_at(probe, probe.ulp)),
        Shown(probe.table or text.NONE),
    ]
    cells += [
        Shown(text.ratio(ratio.value if ratio else None), "at most 1" if _beyond(probe) else ""),
        Shown(_at(probe, ratio)),
    ]
    cells.append(Shown(_times(probe.order) + (f"; 2^n {probe.integers}" if probe.integers else "")))
    fate = [("in", probe.subnormal_inputs), ("out", probe.subnormal_results)]
    cells.append(
        Shown(
            "; ".join(f"{name}: {word}" for name, word in fate if word and word != "none")
            or text.NONE
        )
    )
    return _row(probe, tuple(cells))


def _beyond(probe: FunctionProbe) -> bool:
    """Whether it is the bound, and not a NaN alone, that does not hold."""
    return not replace(probe, wrong="").agrees


def _row(probe: MatrixProbe | FunctionProbe, cells: tuple[Shown, ...]) -> Row:
    from verify.probes import rendering

    word = rendering.verdict(probe)
    return Row(probe.name, cells, word, _STATUS[word])


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


def order_rows(probes: ProbeReport) -> list[tuple[str, ...]]:
    """Cells under ORDER_COLUMNS: those that were revealed, then those that could not be, with the
    reason."""
    found = sorted(probes.orders, key=lambda order: bool(order.reason))
    return [
        (
            o.variant,
            o.config,
            o.dtype or text.NONE,
            str(o.keys or text.NONE),
            o.reason or o.order,
            "  |  ".join(o.groups),
        )
        for o in found
    ]
