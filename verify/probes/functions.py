"""Probes of approximate instructions and functions: their largest errors over all inputs, and their
results at edges.

A kernel computes the function, and the same function in fp64 with CUDA's library.  The library's
error (at most 2 ulp of fp64) is added to the measured one, which gives an upper bound.  A function
of one argument is tried on every bit pattern; a function of two arguments on sampled pairs, which
give no bound.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from verify.arithmetic.archs import arch_named, arch_of
from verify.arithmetic.dtypes import DTYPES, DType
from verify.arithmetic.instructions import DIVISION, EXP, LOG, TANH, Function
from verify.probes import toolchain
from verify.probes.report import FunctionProbe, Worst
from verify.probes.toolchain import Launch, Program

_REFERENCE_ULP = 2.0**-28  # the reference's largest error, in ulp of fp32
_BLOCKS, _THREADS = 2048, 128
_PAIRS = 1 << 32  # sampled inputs of a function of two arguments

_DOUBLES = ("ulp", "relative", "absolute", "ratio", "input_ulp", "result_ulp")
_PLACES = ("ulp_at", "relative_at", "absolute_at", "ratio_at", "input_at", "result_at")
_EXACT = "exact from -126 to 127"
_ONE = "3f800000"  # 1 in fp32, as is every function that the table has 1 at 0
_COUNTS = ("wrong", "wrong_at", "unordered", "unordered_at", "apart", "apart_at")
_TALLIES = ("inputs", "inputs_flushed", "results", "results_flushed")
RECORD = np.dtype(
    [(name, np.float64) for name in _DOUBLES]
    + [(name, np.uint64) for name in (*_PLACES, *_COUNTS, *_TALLIES)]
)


@dataclass(frozen=True)
class Probed:
    """A function to probe.

    call, reference: its name and its fp64 counterpart's in functions.cu.  table: the table's entry
    for it.  format: of inputs and results.  direction: 1 if it increases, -1 if it decreases on
    both sides of zero, 0 if neither is tested.  capability: the lowest that has it.
    """

    name: str
    call: str
    reference: str
    table: Function
    format: str = "float32"
    direction: int = 1
    arguments: int = 1
    integers: bool = False  # test whether 2^n is exact
    near_one: bool = False  # only the absolute error is bounded for inputs near 1
    capability: tuple[int, int] = (8, 0)

    def program(self, entry: str) -> Program:
        """The program with that entry, "survey" or "values"."""
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
        """The format of inputs and results."""
        return DTYPES[self.format]

    @property
    def inputs(self) -> int:
        """The number of inputs, or of sampled inputs."""
        return _PAIRS if self.arguments == 2 else 1 << (8 * self.dtype.itemsize)

    def unsupported_on(self, arch: str) -> str | None:
        """Why a device of that architecture ("sm_90a") does not have it, or None."""
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
    """A function on the current device, or on another executor in tests (see
    `instructions.Bench`)."""

    probed: Probed
    launch: Callable[[Program, Launch, ctypes.Structure], None] = toolchain.run
    device: str = "cuda"
    blocks: int = _BLOCKS

    def survey(self, first: int, count: int) -> NDArray[np.void]:
        """Evaluate `count` inputs from `first` on; returns one `RECORD` per thread."""
        threads = self.blocks * _THREADS
        records = torch.zeros(threads * RECORD.itemsize, dtype=torch.uint8, device=self.device)
        table = self.probed.table
        bound = _Bound(table.error, table.slope, table.absolute)
        arguments = _Arguments(first, count, -(-count // threads), records.data_ptr(), bound)
        self.launch(self.probed.program("survey"), Launch(self.blocks, _THREADS), arguments)
        return records.cpu().numpy().view(RECORD)

    def values(self, x: list[int], z: list[int] | None = None) -> list[int]:
        """The results' bits for these inputs' bits; z: second arguments, by default x."""
        inputs = [
            torch.from_numpy(np.array(bits, np.uint32).view(np.int32)).to(self.device)
            for bits in (x, z or x)
        ]
        results = torch.zeros_like(inputs[0])
        arguments = _Arguments(
            count=len(x), x=inputs[0].data_ptr(), z=inputs[1].data_ptr(), y=results.data_ptr()
        )
        self.launch(
            self.probed.program("values"), Launch(-(-len(x) // _THREADS), _THREADS), arguments
        )
        mask = (1 << (8 * self.probed.dtype.itemsize)) - 1
        return [bits & mask for bits in results.cpu().tolist()]


def probe(
    surveyor: Surveyor, first: int = 0, count: int | None = None, arch: str = ""
) -> FunctionProbe:
    """Probe one function; the result holds any error.

    first, count: the range of inputs; by default all.  arch: the device's architecture ("sm_90"),
    for table entries that depend on it.
    """
    begun, probed = time.perf_counter(), surveyor.probed
    total = probed.inputs if count is None else count
    result = FunctionProbe(
        probed.name, probed.table.source, total, probed.arguments == 1 and total == probed.inputs
    )
    try:
        result = _with_survey(result, probed, surveyor.survey(first, total))
        result = replace(
            result, edges=_edges(surveyor), integers=_integers(surveyor) if probed.integers else ""
        )
        wrong = [result.wrong, *_broken_claims(result, probed, arch)]
        result = replace(result, wrong="; ".join(filter(None, wrong)))
    except Exception as error:
        result = replace(result, error=f"{type(error).__name__}: {error}")
    return replace(result, seconds=round(time.perf_counter() - begun, 3))


def _broken_claims(result: FunctionProbe, probed: Probed, arch: str) -> Iterator[str]:
    """What the table says of single inputs, and the device does not do."""
    if arch in probed.table.exact_at_integers and result.integers != _EXACT:
        yield f"2^n, which the table has exact: {result.integers}"
    if probed.table.one_at_zero:
        assert result.edges is not None
        for zero in ("0", "-0"):
            if result.edges[zero] != _ONE:
                yield f"f({zero}), which the table has 1: {result.edges[zero]}"


def _with_survey(result: FunctionProbe, probed: Probed, records: NDArray[np.void]) -> FunctionProbe:
    def worst(name: str, place: str) -> Worst:
        at = int(records[name].argmax())
        return Worst(float(records[name][at]), _input_bits(probed, int(records[place][at])))

    def counted(name: str) -> str:
        times = int(records[name].sum())
        first = records[f"{name}_at"][records[name] > 0]
        return f"{times} times, the first at {_input_bits(probed, int(first[0]))}" if times else ""

    tally = {name: int(records[name].sum()) for name in _TALLIES}
    ulp = worst("ulp", "ulp_at")
    wrong = {
        "NaN where there is none, or none where there is": counted("wrong"),
        "a pair's results differ": counted("apart"),
    }
    return replace(
        result,
        ulp=ulp,
        ulp_bound=ulp.value + _REFERENCE_ULP if result.exhaustive else None,
        relative=worst("relative", "relative_at"),
        absolute=worst("absolute", "absolute_at"),
        ratio=worst("ratio", "ratio_at"),
        wrong="; ".join(f"{event}: {times}" for event, times in wrong.items() if times),
        order=_order(probed, counted("unordered")),
        subnormal_inputs=_subnormals(
            tally["inputs"], tally["inputs_flushed"], worst("input_ulp", "input_at"), "taken as 0"
        ),
        subnormal_results=_subnormals(
            tally["results"], tally["results_flushed"], worst("result_ulp", "result_at"), "become 0"
        ),
    )


def _order(probed: Probed, against: str) -> str:
    if not probed.direction:
        return ""
    if against:
        return f"not monotone: {against}"
    return "monotone" if probed.direction > 0 else "monotone on either side of 0"


def _subnormals(total: int, flushed: int, ulp: Worst, verb: str) -> str:
    if not total:
        return "none"
    if flushed == total:
        return f"all {verb}"
    return (
        f"{flushed} of {total} {verb}" if flushed else f"within {ulp.value:.3g} ulp (at {ulp.at})"
    )


def _input_bits(probed: Probed, at: int) -> str:
    if probed.arguments == 2:
        return " / ".join(f"{_mix(2 * at + i) & 0xFFFFFFFF:08x}" for i in (1, 2))
    return f"{at:0{2 * probed.dtype.itemsize}x}"


def _mix(counter: int) -> int:
    """The same mixing function as in functions.cu."""
    mask = (1 << 64) - 1
    word = counter * 0x9E3779B97F4A7C15 & mask
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
    return word ^ word >> 31


def _edges(surveyor: Surveyor) -> dict[str, str]:
    """Name of an input -> result bits, for zeros, ends of ranges, infinities and NaN."""
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
    results = surveyor.values(list(inputs.values()))
    return {name: f"{bits:0{digits}x}" for name, bits in zip(inputs, results, strict=True)}


def _integers(surveyor: Surveyor) -> str:
    """A text that says whether 2^n is exact for every integer n with a normal result."""
    numbers = np.arange(-126, 128, dtype=np.float32)
    got = surveyor.values([int(bits) for bits in numbers.view(np.uint32)])
    inexact = [int(n) for n, bits in zip(numbers, got, strict=True) if bits != (int(n) + 127) << 23]
    return _EXACT if not inexact else f"{len(inexact)} inexact, the first at {inexact[0]}"
