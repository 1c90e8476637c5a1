"""Approximating instructions and functions: their largest errors over all inputs, and what they do
at the edges.

One kernel evaluates the function and, in fp64, the same by CUDA's own library, whose error, at most
2 of its ulp, is added to what was measured: an upper bound.  One argument means every bit pattern;
two mean sampled pairs, which bound nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from verify.arithmetic.archs import arch_named, arch_of
from verify.arithmetic.dtypes import DTYPES, DType
from verify.arithmetic.instructions import DIVISION, EXP, LOG, TANH, Function
from verify.probes import toolchain
from verify.probes.toolchain import Launch, Program

_REFERENCE_ULP = 2.0**-28  # what fp64's error is at most, in ulp of fp32
_BLOCKS, _THREADS = 2048, 128
_PAIRS = 1 << 32  # sampled, of a function of two arguments

_DOUBLES = ("ulp", "relative", "absolute", "ratio", "input_ulp", "result_ulp")
_PLACES = ("ulp_at", "relative_at", "absolute_at", "ratio_at", "input_at", "result_at")
_EXACT = "exact from -126 to 127"
_COUNTS = ("wrong", "wrong_at", "unordered", "unordered_at", "apart", "apart_at")
_TALLIES = ("inputs", "inputs_flushed", "results", "results_flushed")
RECORD = np.dtype(
    [(name, np.float64) for name in _DOUBLES]
    + [(name, np.uint64) for name in (*_PLACES, *_COUNTS, *_TALLIES)]
)


@dataclass(frozen=True)
class Probed:
    """A function that is probed.

    call, reference: it and its fp64 counterpart in functions.cu.  table: the entry that must hold.
    format: of inputs and results.  direction: 1 if it increases, -1 if it decreases on either side
    of zero.  capability: the least that has it.
    """

    name: str
    call: str
    reference: str
    table: Function
    format: str = "float32"
    direction: int = 1
    arguments: int = 1
    integers: bool = False  # 2^n must come out exactly
    near_one: bool = False  # where the result is near 0, only the absolute error is bounded
    capability: tuple[int, int] = (8, 0)

    def program(self, entry: str) -> Program:
        """Its kernels are "survey" and "values"."""
        macros = {
            "FUNCTION": self.call,
            "REFERENCE": self.reference,
            "WIDTH": 8 * self.dtype.itemsize,
            "PRECISION": self.dtype.precision,
            "ARGUMENTS": self.arguments,
            "ABSOLUTE_NEAR_ONE": int(self.near_one),
            "DIRECTION": self.direction,
        }
        return Program(
            "functions.cu", entry, tuple((name, str(value)) for name, value in macros.items())
        )

    @property
    def dtype(self) -> DType:
        """Of inputs and results."""
        return DTYPES[self.format]

    @property
    def inputs(self) -> int:
        """How many there are, or are sampled."""
        return _PAIRS if self.arguments == 2 else 1 << (8 * self.dtype.itemsize)

    def not_on(self, arch: str) -> str | None:
        """Why a device of that arch ("sm_90a") has it not, or None."""
        mine = arch_named(arch).capability or (0, 0)
        return None if mine >= self.capability else f"needs {arch_of(self.capability).name}"


def _half(name: str, call: str, reference: str, table: Function, format: str) -> Probed:
    return Probed(
        name, call, reference, table, format, capability=(8, 0) if format == "float16" else (9, 0)
    )


FUNCTIONS: tuple[Probed, ...] = (
    Probed("ex2.approx.ftz.f32", "ptx::ex2", "exp2", EXP["ex2.approx"], integers=True),
    Probed("ex2.approx.f32", "ptx::ex2_approx", "exp2", EXP["ex2.approx"], integers=True),
    Probed("lg2.approx.f32", "ptx::lg2", "log2", LOG["lg2.approx"], near_one=True),
    Probed("lg2.approx.ftz.f32", "ptx::lg2_approx_ftz", "log2", LOG["lg2.approx"], near_one=True),
    Probed("rcp.approx.f32", "ptx::rcp", "reciprocal", DIVISION["rcp.approx"], direction=-1),
    Probed(
        "rcp.approx.ftz.f32",
        "ptx::rcp_approx_ftz",
        "reciprocal",
        DIVISION["rcp.approx"],
        direction=-1,
    ),
    Probed("tanh.approx.f32", "ptx::tanh_approx", "tanh", TANH["tanh.approx"]),
    _half("ex2.approx.f16x2", "ptx::ex2_approx_f16x2", "exp2", EXP["ex2.approx.f16"], "float16"),
    _half(
        "ex2.approx.ftz.bf16x2",
        "ptx::ex2_approx_ftz_bf16x2",
        "exp2",
        EXP["ex2.approx.ftz.bf16"],
        "bfloat16",
    ),
    _half(
        "tanh.approx.f16x2", "ptx::tanh_approx_f16x2", "tanh", TANH["tanh.approx.f16"], "float16"
    ),
    _half(
        "tanh.approx.bf16x2",
        "ptx::tanh_approx_bf16x2",
        "tanh",
        TANH["tanh.approx.bf16"],
        "bfloat16",
    ),
    Probed("exp2f", "exp2f", "exp2", EXP["exp2f"], integers=True),
    Probed("expf", "expf", "exp", EXP["expf"]),
    Probed("__expf", "__expf", "exp", EXP["__expf"]),
    Probed("log2f", "log2f", "log2", LOG["log2f"]),
    Probed("logf", "logf", "log", LOG["logf"]),
    Probed("__logf", "__logf", "log", LOG["__logf"], near_one=True),
    Probed("tanhf", "tanhf", "tanh", TANH["tanhf"]),
    Probed(
        "div.full.f32", "ptx::div_full", "quotient", DIVISION["div.full"], arguments=2, direction=0
    ),
    Probed(
        "div.full.ftz.f32",
        "ptx::div_full_ftz",
        "quotient",
        DIVISION["div.full"],
        arguments=2,
        direction=0,
    ),
    Probed(
        "div.approx.f32",
        "ptx::div_approx",
        "quotient",
        DIVISION["div.approx"],
        arguments=2,
        direction=0,
    ),
)


@dataclass(frozen=True)
class Worst:
    """The largest of something, and the input (bits in hexadecimal digits; of two arguments
    both)."""

    value: float
    at: str


@dataclass(frozen=True)
class FunctionProbe:
    """What was found of one function.

    inputs: how many; exhaustive: all there are, so that `ulp_bound`, the measured and the
    reference's error, bounds every one. ulp, relative: over normal results of normal inputs, but
    for those where only the absolute error is bounded; absolute: over these alone where there are
    some.  table: the entry's source; ratio: error over the table's bound.  order, integers,
    subnormals: in words; edges: result bits by input.  error: why nothing more was found, or "".
    """

    name: str
    table: str = ""
    inputs: int = 0
    exhaustive: bool = False
    ulp: Worst | None = None
    ulp_bound: float | None = None
    relative: Worst | None = None
    absolute: Worst | None = None
    ratio: Worst | None = None
    wrong: str = ""
    order: str = ""
    integers: str = ""
    subnormal_inputs: str = ""
    subnormal_results: str = ""
    edges: dict[str, str] | None = None
    error: str = ""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the table's bound holds, the reference's own error included, and NaN comes out
        where it should alone."""
        return self.ratio is None or (self.ratio.value * (1 + 2.0**-20) <= 1 and not self.wrong)


class _Bound(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("error", "slope", "absolute")]


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("first", "count", "per_thread")),
        ("records", ctypes.c_void_p),
        ("bound", _Bound),
        *((name, ctypes.c_void_p) for name in "xzy"),
    ]


@dataclass(frozen=True)
class Surveyor:
    """A function on the current device, or whatever else `launch` (as `toolchain.run`) runs it
    on."""

    probed: Probed
    launch: Callable[[Program, Launch, ctypes.Structure], None] = toolchain.run
    device: str = "cuda"
    blocks: int = _BLOCKS

    def survey(self, first: int, count: int) -> NDArray[np.void]:
        """One `RECORD` per thread, of `count` inputs from `first` on."""
        threads = self.blocks * _THREADS
        records = torch.zeros(threads * RECORD.itemsize, dtype=torch.uint8, device=self.device)
        table = self.probed.table
        bound = _Bound(table.error, table.slope, table.absolute)
        arguments = _Arguments(first, count, -(-count // threads), records.data_ptr(), bound)
        self.launch(self.probed.program("survey"), Launch(self.blocks, _THREADS), arguments)
        return records.cpu().numpy().view(RECORD)

    def values(self, x: list[int], z: list[int] | None = None) -> list[int]:
        """The results' bits for those inputs' bits."""
        given = [
            torch.from_numpy(np.array(bits, np.uint32).view(np.int32)).to(self.device)
            for bits in (x, z or x)
        ]
        found = torch.zeros_like(given[0])
        arguments = _Arguments(
            count=len(x), x=given[0].data_ptr(), z=given[1].data_ptr(), y=found.data_ptr()
        )
        self.launch(
            self.probed.program("values"), Launch(-(-len(x) // _THREADS), _THREADS), arguments
        )
        mask = (1 << (8 * self.probed.dtype.itemsize)) - 1
        return [bits & mask for bits in found.cpu().tolist()]


def probe(
    surveyor: Surveyor, first: int = 0, count: int | None = None, arch: str = ""
) -> FunctionProbe:
    """Try one function, on all inputs unless said; whatever goes wrong is in the result.

    arch: "sm_90", for what the table says of that one alone.
    """
    begun, probed = time.perf_counter(), surveyor.probed
    total = probed.inputs if count is None else count
    found = FunctionProbe(
        probed.name, probed.table.source, total, probed.arguments == 1 and total == probed.inputs
    )
    try:
        found = _described(found, probed, surveyor.survey(first, total))
        found = replace(
            found, edges=_edges(surveyor), integers=_integers(surveyor) if probed.integers else ""
        )
        if arch in probed.table.exact_at_integers and found.integers != _EXACT:
            found = replace(
                found,
                wrong="; ".join(
                    filter(None, (found.wrong, f"2^n, which the table has exact: {found.integers}"))
                ),
            )
    except Exception as error:
        found = replace(found, error=f"{type(error).__name__}: {error}")
    return replace(found, seconds=round(time.perf_counter() - begun, 3))


def _described(found: FunctionProbe, probed: Probed, records: NDArray[np.void]) -> FunctionProbe:
    def worst(name: str, place: str) -> Worst:
        at = int(records[name].argmax())
        return Worst(float(records[name][at]), _shown(probed, int(records[place][at])))

    def counted(name: str) -> str:
        times = int(records[name].sum())
        first = records[f"{name}_at"][records[name] > 0]
        return f"{times} times, the first at {_shown(probed, int(first[0]))}" if times else ""

    tally = {name: int(records[name].sum()) for name in _TALLIES}
    ulp = worst("ulp", "ulp_at")
    wrong = {
        "NaN where there is none, or none where there is": counted("wrong"),
        "a pair's results differ": counted("apart"),
    }
    return replace(
        found,
        ulp=ulp,
        ulp_bound=ulp.value + _REFERENCE_ULP if found.exhaustive else None,
        relative=worst("relative", "relative_at"),
        absolute=worst("absolute", "absolute_at"),
        ratio=worst("ratio", "ratio_at"),
        wrong="; ".join(f"{what}: {times}" for what, times in wrong.items() if times),
        order=_order(probed, counted("unordered")),
        subnormal_inputs=_fate(
            tally["inputs"], tally["inputs_flushed"], worst("input_ulp", "input_at"), "taken as 0"
        ),
        subnormal_results=_fate(
            tally["results"], tally["results_flushed"], worst("result_ulp", "result_at"), "become 0"
        ),
    )


def _order(probed: Probed, against: str) -> str:
    if not probed.direction:
        return ""
    if against:
        return f"not monotone: {against}"
    return "monotone" if probed.direction > 0 else "monotone on either side of 0"


def _fate(total: int, flushed: int, ulp: Worst, words: str) -> str:
    if not total:
        return "none"
    if flushed == total:
        return f"all {words}"
    return (
        f"{flushed} of {total} {words}" if flushed else f"within {ulp.value:.3g} ulp (at {ulp.at})"
    )


def _shown(probed: Probed, at: int) -> str:
    if probed.arguments == 2:
        return " / ".join(f"{_mixed(2 * at + i) & 0xFFFFFFFF:08x}" for i in (1, 2))
    return f"{at:0{2 * probed.dtype.itemsize}x}"


def _mixed(counter: int) -> int:
    """As in functions.cu."""
    mask = (1 << 64) - 1
    word = counter * 0x9E3779B97F4A7C15 & mask
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
    return word ^ word >> 31


def _edges(surveyor: Surveyor) -> dict[str, str]:
    """Results at zeros, ends of the ranges, infinities and NaN, as bits by input."""
    probed, dtype = surveyor.probed, surveyor.probed.dtype
    if probed.arguments == 2:
        return {}
    digits, sign = 2 * dtype.itemsize, 1 << (8 * dtype.itemsize - 1)
    fraction = dtype.precision - 1
    infinity = (sign - 1) >> fraction << fraction
    sizes = {
        "0": 0,
        "smallest subnormal": 1,
        "largest subnormal": (1 << fraction) - 1,
        "smallest normal": 1 << fraction,
        "largest": infinity - 1,
        "inf": infinity,
        "NaN": infinity | 1 << (fraction - 1),
        "signalling NaN": infinity | 0x15,
    }
    inputs = {
        f"{mark}{name}": bits | (sign if mark else 0)
        for name, bits in sizes.items()
        for mark in ("", "-")
    }
    found = surveyor.values(list(inputs.values()))
    return {name: f"{bits:0{digits}x}" for name, bits in zip(inputs, found, strict=True)}


def _integers(surveyor: Surveyor) -> str:
    """Whether 2^n is exact at every integer n that has a normal result."""
    numbers = np.arange(-126, 128, dtype=np.float32)
    got = surveyor.values([int(bits) for bits in numbers.view(np.uint32)])
    wrong = [int(n) for n, bits in zip(numbers, got, strict=True) if bits != (int(n) + 127) << 23]
    return _EXACT if not wrong else f"{len(wrong)} inexact, the first at {wrong[0]}"
