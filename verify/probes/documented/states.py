"""States of a warp before an instruction, and after it by the manual."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from verify.arithmetic.dtypes import DTYPES
from verify.arithmetic.rounding import cast

LANES = 32
REGISTERS = tuple(f"{name}[{i}]" for name in "xde" for i in range(4))
"""A lane's registers in conformance.cu."""
FILLED = 0xAB  # every byte of shared memory that a trial does not set
Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class State:
    """registers: (trials, 32, 12), in the order of `REGISTERS`.  shared: (trials, bytes)."""

    registers: Words
    shared: Bytes

    def copy(self) -> State:
        return State(self.registers.copy(), self.shared.copy())


def nothing() -> Bytes:
    """No global memory."""
    return np.zeros(0, np.uint8)


@dataclass(frozen=True)
class Trials:
    """Trials of one instruction.

    names: one for each trial.  memory: bytes of global memory to copy from.  nan: the format of the
    results in d[0] if any NaN of it is as good as another, or "".
    """

    names: list[str]
    before: State
    after: State
    memory: Bytes = field(default_factory=nothing)
    nan: str = ""

    def __len__(self) -> int:
        return len(self.names)


def blank(trials: int, shared_bytes: int = 0) -> State:
    """Registers that all differ within a trial, and filled shared memory."""
    numbers = np.arange(LANES * len(REGISTERS), dtype=np.uint32).reshape(LANES, -1)
    registers = np.broadcast_to(0xC0DE0000 + numbers, (trials, *numbers.shape)).copy()
    return State(registers, np.full((trials, shared_bytes), FILLED, np.uint8))


def register(name: str) -> int:
    """The place of a register such as "d[0]" in a lane's registers."""
    return REGISTERS.index(name)


def bits_of(values: NDArray[np.float64], format: str) -> NDArray[np.uint32]:
    """The values' bits, rounded to nearest even."""
    size = DTYPES[format].itemsize
    words = cast(values, DTYPES[format]).contiguous().flatten().view(torch.uint8).numpy()
    return words.view(f"u{size}").astype(np.uint32).reshape(values.shape)


def packed(elements: NDArray[np.uint32], bits: int) -> Words:
    """Elements of that many bits, by the last axis, in 32-bit registers; the first is lowest."""
    each = 32 // bits
    grouped = elements.reshape(*elements.shape[:-1], -1, each)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words: Words = np.bitwise_or.reduce(grouped << shifts, axis=-1).astype(np.uint32)
    return words
