"""Conformance of each instruction of ptx.cuh with the PTX ISA manual.

A kernel lets an instruction change the registers and the shared memory of one warp; all of it is
compared, bit for bit, with what the manual says (`verify.probes.documented`).  What matrix
instructions compute is compared with their model by `verify.probes.matrix`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from verify.arithmetic.archs import arch_named, arch_of
from verify.arithmetic.dtypes import DTYPES
from verify.probes import toolchain
from verify.probes.documented import movement, products, scalars
from verify.probes.documented.states import LANES, REGISTERS, State, Trials, register
from verify.probes.report import ConformanceProbe
from verify.probes.toolchain import Launch, Program

_MATRICES = "Warp-level matrix load and store instructions: ldmatrix, stmatrix"
_COPIES = "Non-bulk copy: cp.async"
_FLOATS = "Floating Point Instructions"
_MOVES = "Data Movement and Conversion Instructions"


@dataclass(frozen=True)
class Conforming:
    """An instruction with its trials.

    name: its own words.  function: of ptx.cuh.  case: in conformance.cu.  section: of the manual.
    trials: in launches of their own, since one can fail.  capability: the lowest that has it.
    """

    name: str
    function: str
    case: str
    section: str
    trials: tuple[Callable[[], Trials], ...]
    capability: tuple[int, int] = (8, 0)

    def unsupported_on(self, arch: str) -> str | None:
        """Why a device of that architecture ("sm_90a") does not have it, or None."""
        mine = arch_named(arch).capability or (0, 0)
        return None if mine >= self.capability else f"needs {arch_of(self.capability).name}"


def _matrices(kind: str, capability: tuple[int, int]) -> list[Conforming]:
    make = movement.ldmatrix if kind == "ldmatrix" else movement.stmatrix
    found = []
    for transposed in (False, True):
        for count in (1, 2, 4):
            trans, suffix = (".trans", "_trans") if transposed else ("", "")
            function = f"{kind}_x{count}{suffix}"
            kinds = (False, True) if count < 4 else (False,)
            found.append(
                Conforming(
                    f"{kind}.sync.aligned.m8n8.x{count}{trans}.shared.b16",
                    function,
                    function.upper(),
                    _MATRICES,
                    tuple(partial(make, count, transposed, useless) for useless in kinds),
                    capability,
                )
            )
    return found


def _product(format: str, short: str, half: bool = False) -> Conforming:
    size = DTYPES[format].itemsize
    shape, sums = ("m16n8k16", "m16n8k32")[size == 1], "f16" if half else "f32"
    case = {1: short, 2: format}[size].upper()
    return Conforming(
        f"mma.sync.aligned.{shape}.row.col.{sums}.{short}.{short}.{sums}",
        f"mma_{shape}_f16" if half else f"mma_{shape}<{format}>",
        f"MMA_{case}{'_HALF' * half}",
        f"Matrix Fragments for mma.{shape}",
        (partial(products.mma, format, half),),
        (8, 0) if size == 2 else (8, 9),
    )


def _copy(cache: str, size: int) -> Conforming:
    name = f"cp.async.{cache}.shared.global, {size} bytes"
    function = f"cp_async_{cache}" + f"<{size}>" * (size < 16)
    case = f"CP_ASYNC_{cache.upper()}" + f"_{size}" * (cache == "ca")
    return Conforming(name, function, case, _COPIES, (partial(movement.cp_async, size),))


def _shuffle(name: str, case: str, mode: str, what: str = "") -> Conforming:
    make = movement.shfl_idx if mode == "idx" else movement.shfl_bfly
    text = f"shfl.sync.{mode}.b32{what}"
    return Conforming(text, name, case, f"{_MOVES}: shfl.sync", (make,))


def _function(name: str, function: str, case: str) -> Conforming:
    trials = partial(scalars.special, name)
    return Conforming(f"{name}, special values", function, case, _FLOATS, (trials,))


def _conversion(format: str, short: str) -> Conforming:
    eight = DTYPES[format].itemsize == 1
    return Conforming(
        f"cvt.rn.{'satfinite.' * eight}{short}x2.f32",
        f"pack<{format}>",
        f"PACK_{(short if eight else format).upper()}",
        f"{_MOVES}: cvt",
        (partial(scalars.cvt, format),),
        (8, 9) if eight else (8, 0),
    )


def _widening(format: str, short: str) -> Conforming:
    return Conforming(
        f"cvt.f32.{short}, twice",
        f"unpack<{format}>",
        f"UNPACK_{format.upper()}",
        f"{_MOVES}: cvt",
        (partial(scalars.widening, format),),
    )


CONFORMING: tuple[Conforming, ...] = (
    *_matrices("ldmatrix", (8, 0)),
    *_matrices("stmatrix", (9, 0)),
    _copy("cg", 16),
    *(_copy("ca", size) for size in (16, 8, 4)),
    Conforming(
        "cp.async.commit_group, cp.async.wait_group",
        "cp_async_wait_group",
        "CP_ASYNC_GROUPS",
        _COPIES,
        (movement.cp_async_groups,),
    ),
    _shuffle("shfl_bfly", "SHFL_BFLY", "bfly"),
    _shuffle("shfl_bfly", "SHFL_BFLY_FLOAT", "bfly", " of fp32"),
    _shuffle("shfl_idx", "SHFL_IDX", "idx"),
    Conforming("prmt.b32", "prmt", "PRMT", f"{_MOVES}: prmt", (movement.prmt,)),
    _product("float16", "f16"),
    _product("float16", "f16", half=True),
    _product("bfloat16", "bf16"),
    _product("float8_e4m3fn", "e4m3"),
    _product("float8_e5m2", "e5m2"),
    _function("ex2.approx.ftz.f32", "ex2", "EX2"),
    Conforming(
        "ex2.approx.f16x2, special values",
        "ex2_approx_f16x2",
        "EX2_F16X2",
        _FLOATS,
        (scalars.special_pairs,),
    ),
    _function("lg2.approx.f32", "lg2", "LG2"),
    _function("rcp.approx.f32", "rcp", "RCP"),
    _conversion("float16", "f16"),
    _conversion("bfloat16", "bf16"),
    _conversion("float8_e4m3fn", "e4m3"),
    _conversion("float8_e5m2", "e5m2"),
    _widening("float16", "f16"),
    _widening("bfloat16", "bf16"),
)

PROGRAM = Program(
    "conformance.cu",
    "conformance",
    tuple((one.case, str(number)) for number, one in enumerate(CONFORMING)),
)


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("before", "after", "memory")),
        *((name, ctypes.c_uint32) for name in ("shared_bytes", "instruction")),
    ]


@dataclass(frozen=True)
class Warp:
    """A warp of the current device, or of another executor in tests (see `instructions.Bench`)."""

    launch: Callable[[Program, Launch, ctypes.Structure], None] = toolchain.run
    device: str = "cuda"

    def leaves(self, instruction: Conforming, trials: Trials) -> State:
        """The states that the instruction leaves."""
        count, shared_bytes = trials.before.shared.shape
        registers = trials.before.registers.reshape(count, -1).view(np.uint8)
        states = np.concatenate((registers, trials.before.shared), 1)
        before, memory = (torch.from_numpy(x).to(self.device) for x in (states, trials.memory))
        after = torch.zeros_like(before)
        pointers = (x.data_ptr() for x in (before, after, memory))
        number = CONFORMING.index(instruction)
        how = Launch(count, LANES, shared_bytes)
        self.launch(PROGRAM, how, _Arguments(*pointers, shared_bytes, number))
        result = after.cpu().numpy()
        words = np.ascontiguousarray(result[:, : registers.shape[1]]).view(np.uint32)
        return State(words.reshape(trials.before.registers.shape), result[:, registers.shape[1] :])


def probe(warp: Warp, instruction: Conforming) -> ConformanceProbe:
    """Compare one instruction with the manual; the result holds any error, and what was compared
    before it."""
    begun, result = time.perf_counter(), ConformanceProbe(instruction.name)
    try:
        for make in instruction.trials:
            trials = make()
            result = _compared(result, trials, warp.leaves(instruction, trials))
    except Exception as error:
        result = replace(result, error=f"{type(error).__name__}: {error}")
    return replace(result, seconds=round(time.perf_counter() - begun, 3))


def _compared(result: ConformanceProbe, trials: Trials, got: State) -> ConformanceProbe:
    registers = _unified(got, trials.nan) != _unified(trials.after, trials.nan)
    shared = got.shared != trials.after.shared
    differs = registers.any((1, 2)) | shared.any(1)
    first = ""
    if differs.any():
        trial = int(differs.argmax())
        if registers[trial].any():
            lane, place = (int(i) for i in np.argwhere(registers[trial])[0])
            where = f"lane {lane}, {REGISTERS[place]}"
            words = [x.registers[trial, lane, place] for x in (got, trials.after)]
            left, wanted = (f"{int(word):08x}" for word in words)
        else:
            at = int(shared[trial].argmax())
            where = f"shared byte {at}"
            left, wanted = (f"{int(x.shared[trial, at]):02x}" for x in (got, trials.after))
        first = f"{trials.names[trial]}: {where}: {left}, the manual has {wanted}"
    return replace(
        result,
        checks=result.checks + len(trials),
        differing=result.differing + int(differs.sum()),
        first=result.first or first,
    )


def _unified(state: State, nan: str) -> NDArray[np.uint32]:
    """The registers, with one NaN for all those of d[0] in that format."""
    if not nan:
        return state.registers
    registers, found = state.registers.copy(), DTYPES[nan]
    kind = np.dtype(f"u{found.itemsize}")
    column = np.ascontiguousarray(registers[:, :, register("d[0]")])
    elements = column.view(kind)
    values = torch.from_numpy(elements.view(f"i{found.itemsize}")).view(found.torch)
    elements[values.double().isnan().numpy()] = np.iinfo(kind).max
    registers[:, :, register("d[0]")] = column
    return registers
