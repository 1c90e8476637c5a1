"""The tensor maps of the forwards for Hopper: what the copy engine is told about a tensor."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from verify.cuda.compile import LaunchError
from verify.variant import Unsupported

WIDEST = 128  # bytes of a box's row, which the swizzle is wide
MAP_BYTES = 128
MAP_ALIGNMENT = 64

Structure = TypeVar("Structure", bound=ctypes.Structure)


@dataclass(frozen=True)
class TensorMap:
    """What cuTensorMapEncodeTiled is told about a (batch, heads, seqlen, head_dim) tensor.

    dtype: one of `_TYPES`.  address: in bytes, a multiple of 16.
    dims: head_dim, seqlen, heads, batch.  strides: of seqlen, heads and batch, in bytes.
    box: columns, rows, 1, 1.
    """

    dtype: str
    address: int
    dims: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int, int]


def piece(head_dim: int, itemsize: int) -> int:
    """Columns of a box: as many as the widest swizzle has, or all."""
    return min(head_dim, WIDEST // itemsize)


def tensor_map(name: str, tensor: Tensor, rows: int, elsewhere: int = 0) -> TensorMap:
    """The map of q, k or v for tiles of that many rows.

    A dimension that repeats the same elements has size 1 in it, and the kernel asks for index 0.
    No map is empty: that of a tensor without rows has one, at the address `elsewhere`, and nothing
    asks for it.  Raises `Unsupported` if rows repeat.
    """
    _, _, seqlen, head_dim = tensor.shape
    if seqlen > 1 and tensor.stride(2) == 0:
        raise Unsupported(f"layout_{name}", "a tensor map cannot repeat a row: make it whole")
    sizes, strides = [], []
    for dim in (2, 1, 0):
        repeats = tensor.shape[dim] <= 1 or tensor.stride(dim) == 0
        sizes.append(1 if repeats else tensor.shape[dim])
        strides.append((head_dim if repeats else tensor.stride(dim)) * tensor.itemsize)
    return TensorMap(
        str(tensor.dtype).removeprefix("torch."),
        tensor.data_ptr() if tensor.numel() else elsewhere,
        (head_dim, *sizes),
        tuple(strides),
        (piece(head_dim, tensor.itemsize), rows, 1, 1),
    )


# CUtensorMapDataType, -Interleave, -Swizzle, -L2promotion and -FloatOOBfill in cuda.h; 8 bits go as
# bytes, and the swizzle is named by the bytes of a box's row.
_TYPES = {"float16": 6, "bfloat16": 9, "float8_e4m3fn": 0}
_NOT_INTERLEAVED = 0
_SWIZZLES = {64: 2, 128: 3}
_PROMOTE_256B = 3
_FILL_ZEROS = 0


def encode(made: TensorMap, to: int) -> None:
    """Write the 128 bytes of a map to the host address `to`, with the swizzle that its box is wide.
    Raises LaunchError."""
    if to % MAP_ALIGNMENT:
        raise LaunchError(f"a tensor map at {to:#x}: {MAP_ALIGNMENT} must divide its address")
    rank = len(made.dims)
    swizzle = _SWIZZLES[made.box[0] * getattr(torch, made.dtype).itemsize]
    status = _encoder()(
        ctypes.c_void_p(to),
        ctypes.c_int(_TYPES[made.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(made.address),
        (ctypes.c_uint64 * rank)(*made.dims),
        (ctypes.c_uint64 * (rank - 1))(*made.strides),
        (ctypes.c_uint32 * rank)(*made.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        *map(ctypes.c_int, (_NOT_INTERLEAVED, swizzle, _PROMOTE_256B, _FILL_ZEROS)),
    )
    if status:
        raise LaunchError(f"cuTensorMapEncodeTiled: {_words(status)} for {made}")


def _words(status: int) -> str:
    """The driver's name and text of an error."""
    from cuda.bindings import driver

    error = driver.CUresult(status)
    _, text = driver.cuGetErrorString(error)
    return f"{error.name}: {(text or b'').decode()}"


@cache
def _encoder() -> ctypes._CFuncPtr:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


def aligned(structure: type[Structure]) -> Structure:
    """An empty structure at an address that 64 divides."""
    memory = (ctypes.c_uint8 * (ctypes.sizeof(structure) + MAP_ALIGNMENT))()
    return structure.from_buffer(memory, -ctypes.addressof(memory) % MAP_ALIGNMENT)
