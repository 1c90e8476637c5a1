"""What a forward kernel in CUDA C++ is launched with: one structure, by value.

A kernel that takes it declares the same in its .cu file.
"""

from __future__ import annotations

import ctypes
import math

from torch import Tensor

from references.masks import Causal
from verify.variant import AttentionArgs

LOG2_E = math.log2(math.e)


class Strided(ctypes.Structure):
    """A tensor's address and its strides of batch, head and row, in the unit that the kernel counts
    in."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    ]

    @staticmethod
    def of(tensor: Tensor, *, in_bytes: bool) -> Strided:
        """Of a (batch, heads, seqlen, head_dim) tensor; strides in bytes or else in elements."""
        unit = tensor.itemsize if in_bytes else 1
        return Strided(tensor.data_ptr(), *(stride * unit for stride in tensor.stride()[:3]))


class Arguments(ctypes.Structure):
    """One problem.  lse: address of (batch, heads_q, seqlen_q), contiguous fp32; group: query heads
    per key head; scale_log2: softmax_scale log2 e; diagonal: see `diagonal`."""

    _fields_ = [
        *((name, Strided) for name in ("q", "k", "v", "out")),
        ("lse", ctypes.c_uint64),
        *(
            (name, ctypes.c_int32)
            for name in ("heads_q", "group", "seqlen_q", "seqlen_kv", "diagonal")
        ),
        ("scale_log2", ctypes.c_float),
    ]

    @staticmethod
    def of(args: AttentionArgs, out: Tensor, lse: Tensor, *, in_bytes: bool) -> Arguments:
        """Of one problem, whose mask is full or causal; strides in bytes or else in elements."""
        return Arguments(
            *(Strided.of(tensor, in_bytes=in_bytes) for tensor in (args.q, args.k, args.v, out)),
            lse.data_ptr(),
            args.heads_q,
            args.heads_q // args.heads_kv,
            args.seqlen_q,
            args.seqlen_kv,
            diagonal(args),
            args.softmax_scale * LOG2_E,
        )


def diagonal(args: AttentionArgs) -> int:
    """Row r sees keys up to r + diagonal; full attention has them all below it."""
    if not isinstance(args.mask, Causal):
        return args.seqlen_kv
    return args.seqlen_kv - args.seqlen_q if args.mask.alignment == "br" else 0
