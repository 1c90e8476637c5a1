"""The probed matrix instructions, and the layout of dot products in their tiles.

Shapes, types and targets are from PTX ISA 9.1, "Multiply-and-Accumulate Instruction: mma" and
"wgmma.mma_async".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verify.arithmetic.archs import arch_named, arch_of, archs
from verify.arithmetic.dtypes import DTYPES, DType
from verify.probes import toolchain
from verify.probes.toolchain import Launch, Program

COLUMNS = 8  # of B in every tile

TF32 = DType("tf32", 11, -126, (2 - 2.0**-10) * 2.0**127, 4)

# (a, b, c) -> d.  a, b: (n, k) operands; c, d: (n,) in the accumulator's dtype; all on the CPU.
Dot = Callable[[Tensor, Tensor, Tensor], Tensor]
# The same for whole tiles: a (tiles, rows, k), b (tiles, 8, k), c and d (tiles, rows, 8).
Tiles = Callable[[Tensor, Tensor, Tensor], Tensor]

# Bytes -> the integer dtype of that size.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Instruction:
    """One matrix instruction.

    kind: "mma.sync" or "wgmma".  shape: such as "m16n8k16".  operands, accumulator: names for
    `verify.arithmetic.mma.unit_for`.  function: its wrapper in ptx.cuh or ptx_probes.cuh.
    capability: the lowest compute capability that has it; only sm_90a has "wgmma".
    """

    kind: str
    shape: str
    operands: str
    accumulator: str
    function: str
    capability: tuple[int, int] = (8, 0)

    @property
    def name(self) -> str:
        short = {
            "float64": "f64",
            "float32": "f32",
            "float16": "f16",
            "bfloat16": "bf16",
            "tf32": "tf32",
        }
        short |= {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
        return f"{self.kind} {self.shape} {short[self.operands]} into {short[self.accumulator]}"

    @property
    def depth(self) -> int:
        """K: products of one element of the result."""
        return int(self.shape.rpartition("k")[2])

    @property
    def rows(self) -> int:
        """M: rows of A in a tile."""
        return int(self.shape[1:].partition("n")[0])

    @property
    def format(self) -> DType:
        """The operands' format."""
        return TF32 if self.operands == "tf32" else DTYPES[self.operands]

    @property
    def dtype(self) -> torch.dtype:
        """The operands' dtype in memory."""
        return torch.float32 if self.operands == "tf32" else self.format.torch

    @property
    def result(self) -> DType:
        """The accumulator's format."""
        return DTYPES[self.accumulator]

    @property
    def program(self) -> Program:
        """The program that runs it."""
        macros = {
            "FUNCTION": f"ptx::{self.function}",
            "ROW_BYTES": self.depth * self.dtype.itemsize,
            "HALF": int(self.accumulator == "float16"),
            "WARPGROUP": int(self.kind == "wgmma"),
            "DOUBLE": int(self.operands == "float64"),
        }
        return Program("mma.cu", "mma", tuple((name, str(value)) for name, value in macros.items()))

    def unsupported_on(self, arch: str) -> str | None:
        """Why a device of that architecture ("sm_90a") does not have it, or None."""
        found = arch_named(arch)
        if self.kind not in (found.instructions or ("mma.sync",)):
            having = (each.target for each in archs() if self.kind in each.instructions)
            return f"only {', '.join(having)} has {self.kind}"
        mine = found.capability or (0, 0)
        return None if mine >= self.capability else f"needs {arch_of(self.capability).name}"


def _sync(
    shape: str, operands: str, accumulator: str, function: str, capability: tuple[int, int] = (8, 0)
) -> Instruction:
    return Instruction("mma.sync", shape, operands, accumulator, function, capability)


def _eight_bits() -> list[Instruction]:
    forms = []
    for operands, short in (("float8_e4m3fn", "e4m3"), ("float8_e5m2", "e5m2")):
        for accumulator, suffix in (("float32", "f32"), ("float16", "f16")):
            for shape in ("m16n8k16", "m16n8k32"):
                function = f"mma_{shape}_{short}_{suffix}"
                if (shape, accumulator) == ("m16n8k32", "float32"):  # which kernels use
                    function = f"mma_m16n8k32<ptx::Format::{operands}>"
                forms.append(_sync(shape, operands, accumulator, function, (8, 9)))
            function = f"wgmma_m64n8k32_{short}_{suffix}"
            forms.append(Instruction("wgmma", "m64n8k32", operands, accumulator, function, (9, 0)))
    return forms


def _warpgroup(shape: str, operands: str, accumulator: str, function: str) -> Instruction:
    return Instruction("wgmma", shape, operands, accumulator, function, (9, 0))


INSTRUCTIONS: tuple[Instruction, ...] = tuple(
    sorted(
        (
            _sync("m16n8k8", "float16", "float32", "mma_m16n8k8_f16_f32"),
            _sync("m16n8k8", "float16", "float16", "mma_m16n8k8_f16_f16"),
            _sync("m16n8k8", "bfloat16", "float32", "mma_m16n8k8_bf16_f32"),
            _sync("m16n8k16", "float16", "float32", "mma_m16n8k16<ptx::Format::float16>"),
            _sync("m16n8k16", "float16", "float16", "mma_m16n8k16_f16"),
            _sync("m16n8k16", "bfloat16", "float32", "mma_m16n8k16<ptx::Format::bfloat16>"),
            _sync("m16n8k4", "tf32", "float32", "mma_m16n8k4_tf32_f32"),
            _sync("m16n8k8", "tf32", "float32", "mma_m16n8k8_tf32_f32"),
            _sync("m8n8k4", "float64", "float64", "mma_m8n8k4_f64"),
            _warpgroup("m64n8k16", "float16", "float32", "wgmma_m64n8k16_f16_f32"),
            _warpgroup("m64n8k16", "float16", "float16", "wgmma_m64n8k16_f16_f16"),
            _warpgroup("m64n8k16", "bfloat16", "float32", "wgmma_m64n8k16_bf16_f32"),
            _warpgroup("m64n8k8", "tf32", "float32", "wgmma_m64n8k8_tf32_f32"),
            *_eight_bits(),
        ),
        key=lambda instruction: (
            instruction.kind,
            list(DTYPES).index(instruction.format.name.replace("tf32", "float32")),
        ),
    )
)


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in "abcd"] + [("tiles", ctypes.c_uint32)]


@dataclass(frozen=True)
class Bench:
    """An instruction on the current device, or on another executor in tests.

    launch(program, how, arguments): `toolchain.run` or a replacement.  device: torch's name of the
    device that the arguments' pointers belong to.
    """

    instruction: Instruction
    launch: Callable[[Program, Launch, ctypes.Structure], None] = toolchain.run
    device: str = "cuda"

    def tiles(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Run the instruction on tiles (see `Tiles`)."""
        one, count = self.instruction, len(a)
        inputs = [_bits(x).to(self.device) for x in (a, b, c)]
        result = torch.full_like(inputs[2], -1)  # NaN, where the kernel writes nothing
        wgmma = one.kind == "wgmma"
        how = Launch(count, 128, 256) if wgmma else Launch((count + 3) // 4, 128)
        self.launch(one.program, how, _Arguments(*(x.data_ptr() for x in (*inputs, result)), count))
        return result.cpu().view(one.result.torch)

    @cached_property
    def dot(self) -> Dot:
        """A `Dot` with one dot product per column of a tile, which uses all rows and columns."""
        return spread(self.instruction, self.tiles)


def spread(instruction: Instruction, tiles: Tiles) -> Dot:
    """A `Dot` from a `Tiles`: successive dot products use the rows and columns of tiles in turn."""
    rows, depth, result = instruction.rows, instruction.depth, instruction.result.torch

    def dot(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        at = torch.arange(len(a))
        tile, column = at // COLUMNS, at % COLUMNS
        row = (column + COLUMNS * (tile % max(rows // COLUMNS, 1))) % rows
        count = (len(a) + COLUMNS - 1) // COLUMNS
        left, right = (_zeros((count, n, depth), a.dtype) for n in (rows, COLUMNS))
        start = _zeros((count, rows, COLUMNS), result)
        _bits(left)[tile, row], _bits(right)[tile, column], _bits(start)[tile, row, column] = (
            _bits(a),
            _bits(b),
            _bits(c),
        )
        return tiles(left, right, start)[tile, row, column]

    return dot


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=WORDS[dtype.itemsize]).view(dtype)


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers, which torch can index, copy and compare for every format."""
    return x.contiguous().view(WORDS[x.dtype.itemsize])
