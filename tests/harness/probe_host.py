"""The probes' kernels compiled for the host, with a planted matrix unit instead of the tensor
core."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.harness.host_library import host_library
from verify.arithmetic.dot import mma
from verify.arithmetic.unit import Unit
from verify.probes.instructions import WORDS, Instruction
from verify.probes.toolchain import HERE, Launch, Program

_MULTIPLY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


@dataclass
class HostProgram:
    """A program compiled for the CPU, with a part of its text replaced; `launch` replaces
    `toolchain.run`.

    Headers in the folder come before those of the harness.  late: copies land when they are waited
    for.
    """

    program: Program
    folder: Path
    edit: Callable[[str], str] = lambda text: text
    backwards: bool = True
    late: bool = False

    def __post_init__(self) -> None:
        kernel = self.folder / self.program.file
        kernel.write_text(
            self.edit((HERE / self.program.file).read_text(encoding="utf-8")), encoding="utf-8"
        )
        self.library = host_library(kernel, self.program.entry, self.program.macros)

    def launch(self, program: Program, how: Launch, arguments: ctypes.Structure) -> None:
        """Run every block."""
        assert program == self.program
        conflicts = (ctypes.c_long * 2)()
        shape = how.blocks, how.threads, how.shared_bytes, self.backwards, self.late
        error = self.library.run(ctypes.byref(arguments), *shape, conflicts)
        if error:
            raise RuntimeError(error.decode())

    def plant(self, instruction: Instruction, unit: Unit) -> None:
        """Use the unit for multiplications."""
        size, depth = instruction.dtype.itemsize, instruction.depth
        rows = min(instruction.rows, 16)  # of one warp

        def array(at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            count = int(torch.Size(shape).numel()) * dtype.itemsize
            return (
                torch.frombuffer((ctypes.c_uint8 * count).from_address(at), dtype=torch.uint8)
                .view(dtype)
                .view(shape)
            )

        def multiply(a: int, b: int, c: int, width: int) -> None:
            assert width == size * depth
            left, right = (
                array(a, (rows, depth), instruction.dtype),
                array(b, (8, depth), instruction.dtype),
            )
            total = array(c, (rows, 8), instruction.result.torch)
            total.view(WORDS[total.element_size()]).copy_(
                mma(left, right.mT, total, unit).view(WORDS[total.element_size()])
            )

        self._kept = _MULTIPLY(multiply)  # as long as the library may call it
        self.library.set_tensor_core(self._kept)
