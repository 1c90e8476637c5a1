"""The table of matrix units, per architecture, operand type and accumulator, each entry with its
source.

What a kernel calls "float8" is either 8-bit type.  fp32 and fp64 operands run on fused
multiply-adds everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from verify.arithmetic.archs import MMASIM, SASS
from verify.arithmetic.unit import AnyOf, Envelope, NearestChain, Promoted, Unit, Wiring

_FASI = "Fasi, Higham, Mikaitis, Pranesh, PeerJ Computer Science 7:e330, 2021"
_MODELS = "Khattak and Mikaitis, arXiv 2512.07004"
_FTTN = "FTTN, arXiv 2403.00232"
_HIGHAM = "IEEE 754-2019; Higham 2002, sections 3.1 and 4.2: any order"

# Truncation of 13 of fp32's 23 fraction bits.  Two truncated operands lose less than 2 * 2**-10 of
# their product, and shrink it; two rounded ones, where a compiler adds that, err by half as much,
# which leaves room for the second order.
_TF32_ERROR = 2.0**-10
# Three products of a high and a low part of 11 bits each: truncation leaves 2**-20 of each operand,
# and so does the product of the low parts, which is not formed.  Three instructions instead of one;
# the table counts four.
_TF32X3_ERROR = 1.5 * 2.0**-20
# the quantum of tf32's subnormals: fp32's, 2**-149, without its low 13 bits
_TF32_FLUSH = 2.0**-136

# The exponent that terms of zero bring along is in MMA-Sim's source, for each generation.
_VOLTA, _TURING, _HOPPER = (Wiring(zero=exponent) for exponent in (-131, -132, -133))
# Where fp8 products are emulated, the first instruction takes bytes 0 and 1 of each register of 4,
# the second 2 and 3.
_BYTES = {
    depth: tuple(4 * j + i for half in (0, 2) for j in range(depth // 4) for i in (half, half + 1))
    for depth in (16, 32)
}

FMA32 = NearestChain(1, 24, 24, source=_HIGHAM)
FMA64 = NearestChain(
    1,
    53,
    53,
    accumulator="float64",
    wiring=Wiring(zeros="ieee", nan="kept"),
    source=f"{_HIGHAM}; tensor cores chain FMAs: {MMASIM}",
)

# Sums that are kept in bfloat16, on CPUs: an fp32 addition and a cast after each product err by
# less than one rounding of unit roundoff 2**-8, whatever the operands.
BFLOAT16_SUMS = NearestChain(
    1, 8, 8, accumulator="bfloat16", source=f"{_HIGHAM}; rounded after every product"
)


def bfloat16_blocks(products: int) -> Unit:
    """The same, where so many products are added in fp32 before a cast."""
    return Unit(
        products,
        22,
        7,
        accumulator="bfloat16",
        rounding="nearest",
        wiring=Wiring(normalises=True),
        source=f"{_HIGHAM}; rounded to bfloat16 after {products} products",
    )


@dataclass(frozen=True)
class Entry:
    """One unit and what it is for.

    arches: those whose unit it is, by name.  operands: types that it multiplies.
    instructions: those that use it; "" is among them if a kernel that says nothing else is bounded
    by it, and "mma.sync.*" if one that says "mma.sync" is, where the shapes of that differ.
    """

    arches: tuple[str, ...]
    operands: tuple[str, ...]
    instructions: tuple[str, ...]
    unit: Unit


def _both(entry: Entry, source: str = "") -> Iterator[Entry]:
    """The entry and the same with an fp16 accumulator, which no unit has for other than fp16 and
    8-bit operands."""
    yield entry
    kept = tuple(name for name in entry.operands if name in ("float16", "float8"))
    note = source or f"{entry.unit.source}; to nearest, to fp16, after every group: {MMASIM}"
    yield replace(entry, operands=kept, unit=half(entry.unit, note))


def half(unit: Unit, source: str) -> Unit:
    """The unit with an fp16 accumulator."""
    narrow = replace(unit, output=10, accumulator="float16", rounding="nearest", source=source)
    return replace(narrow, own=True) if isinstance(narrow, Promoted) else narrow


_ALL = ("", "mma.sync")
_WIDE = ("", "mma.sync", "wgmma")
_NEW = ("", "mma.sync", "tcgen05")
_TYPES = ("float16", "bfloat16")
_AMPERE, _BLACKWELL, _RTX = ("sm_80", "sm_89"), ("sm_100",), ("sm_120",)


def _tf32(
    arches: tuple[str, ...],
    instructions: tuple[str, ...],
    products: int,
    fraction: int,
    wiring: Wiring,
) -> Iterator[Entry]:
    """tf32, and three of it for one product of fp32."""
    errors, source = (_TF32_ERROR, _TF32_FLUSH), f"{MMASIM}; {_MODELS}"
    unit = Unit(products, fraction, 23, *errors, wiring=wiring, source=source)
    yield Entry(arches, ("tf32",), instructions, unit)
    # Four times the terms, in the same groups.
    triple = Envelope(
        products // 4,
        fraction - 2,
        23,
        _TF32X3_ERROR,
        _TF32_FLUSH,
        source=f"derived from tf32's: {source}",
    )
    yield Entry(arches, ("tf32x3",), ("",), triple)


def _emulated(arches: tuple[str, ...]) -> Iterator[Entry]:
    """fp8 through mma.sync where only wgmma or tcgen05 have a unit for it: converted to fp16, two
    instructions from zero, and an addition to the accumulator in its own dtype."""
    source = f"{SASS}: F2FP.F16.E4M3.UNPACK_B, two HMMA from zero, FADD or HADD2; HMMA as fp16"
    shapes: dict[str, list[Unit]] = {}
    for name, depth in (("mma.sync", 32), ("mma.sync.m16n8k16", 16)):
        wiring = replace(_HOPPER, order=_BYTES[depth], via="float16")
        unit = Promoted(depth // 2, 25, 23, wiring=wiring, source=source, every=depth)
        for entry in _both(Entry(arches, ("float8",), (name,), unit), source):
            shapes.setdefault(entry.unit.accumulator, []).append(entry.unit)
            yield entry
    for units in shapes.values():
        yield Entry(arches, ("float8",), ("mma.sync.*",), AnyOf.these(*units))


_WGMMA8 = Unit(32, 13, 13, wiring=_HOPPER, source=f"{MMASIM}; {_MODELS}")

_TABLE: tuple[Entry, ...] = (
    *_both(
        Entry(
            ("sm_70",),
            ("float16",),
            _ALL,
            Unit(4, 23, 23, wiring=_VOLTA, source=f"{_FASI}; {MMASIM}"),
        )
    ),
    *_both(
        Entry(
            ("sm_75",),
            ("float16",),
            ("",),
            Envelope(4, 24, 23, wiring=_TURING, source=f"{_FASI}: L = 4; {MMASIM}: L = 8"),
        )
    ),
    *_both(
        Entry(
            ("sm_75",), ("float16",), ("mma.sync",), Unit(8, 24, 23, wiring=_TURING, source=MMASIM)
        )
    ),
    *_both(
        Entry(
            _AMPERE,
            _TYPES,
            _ALL,
            Unit(8, 24, 23, wiring=_TURING, source=f"{_FASI}; {MMASIM}; {_MODELS}"),
        )
    ),
    *_tf32(_AMPERE, _ALL, 4, 24, _TURING),
    *_both(
        Entry(
            ("sm_89",),
            ("float8",),
            _ALL,
            Unit(16, 13, 13, wiring=_TURING, source=f"{MMASIM}; {_MODELS}"),
        )
    ),
    *_both(
        Entry(
            ("sm_90",),
            _TYPES,
            _WIDE,
            Unit(16, 25, 23, wiring=_HOPPER, source=f"{MMASIM}; {_MODELS}; {_FTTN}"),
        )
    ),
    *_tf32(("sm_90",), _WIDE, 8, 25, _HOPPER),
    Entry(("sm_90",), ("float8",), ("", "wgmma"), _WGMMA8),
    Entry(("sm_90",), ("float8",), ("wgmma",), half(_WGMMA8, _WGMMA8.source)),
    # Into fp16 mma.sync, which is emulated, rounds more often than wgmma: twice in 16 products.
    Entry(
        ("sm_90",),
        ("float8",),
        ("",),
        half(Envelope(8, 13, 13, wiring=_HOPPER, parts=True), f"{MMASIM}; {SASS}"),
    ),
    *_emulated(("sm_90", *_BLACKWELL)),
    *_both(
        Entry(
            _BLACKWELL,
            _TYPES,
            _NEW,
            Unit(16, 25, 23, wiring=_HOPPER, source=f"{MMASIM}; {_MODELS}"),
        )
    ),
    *_tf32(_BLACKWELL, _NEW, 8, 25, _HOPPER),
    *_both(
        Entry(
            _BLACKWELL,
            ("float8",),
            ("tcgen05",),
            Unit(32, 25, 23, wiring=_HOPPER, source=f"{MMASIM}; {_MODELS}"),
        )
    ),
    # tcgen05 converts every 32 products, the emulation of m16n8k16 every 8.
    *_both(
        Entry(
            _BLACKWELL,
            ("float8",),
            ("",),
            Envelope(8, 25, 23, wiring=_HOPPER, parts=True, source=f"{MMASIM}; {SASS}"),
        )
    ),
    *_both(Entry(_RTX, _TYPES, _ALL, Unit(16, 25, 23, wiring=_HOPPER, source=MMASIM))),
    *_tf32(_RTX, _ALL, 8, 25, _HOPPER),
    *_both(Entry(_RTX, ("float8",), _ALL, Unit(32, 25, 23, wiring=_HOPPER, source=MMASIM))),
    Entry(("cpu", "interpreter"), ("float16", "float8"), ("",), FMA32),
    # AVX-512's bfloat16 dot product, which torch's matmul uses where it can, takes subnormals as
    # zero. With AMX oneDNN reads past the end of a row (docs/findings.md, 15).
    Entry(
        ("cpu",),
        ("bfloat16",),
        ("",),
        replace(FMA32, flush=2.0**-126, spills=True, source=f"{_HIGHAM}; Intel SDM, VDPBF16PS"),
    ),
    Entry(("interpreter",), ("bfloat16",), ("",), FMA32),
    # As verify/cell/triton_interpreter.py multiplies what a kernel lets be tf32.
    Entry(
        ("cpu", "interpreter"),
        ("tf32",),
        ("",),
        replace(
            FMA32,
            operand_error=_TF32_ERROR,
            flush=_TF32_FLUSH,
            source=f"13 bits dropped, then fp32: {_HIGHAM}",
        ),
    ),
    Entry(
        ("cpu", "interpreter"),
        ("float16", "float8"),
        ("",),
        NearestChain(1, 11, 11, accumulator="float16", source=_HIGHAM),
    ),
)

# (operands, accumulator) -> arch -> instruction -> unit.
UNITS: dict[tuple[str, str], dict[str, dict[str, Unit]]] = {}
for _entry in _TABLE:
    for _operands in _entry.operands:
        for _arch in _entry.arches:
            _row = UNITS.setdefault((_operands, _entry.unit.accumulator), {}).setdefault(_arch, {})
            _row |= dict.fromkeys(_entry.instructions, _entry.unit)
