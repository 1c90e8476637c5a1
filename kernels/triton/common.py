"""What the Triton variants share on the host: head-dim buckets, blocks, the aligned bit,
a launch."""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from verify.variant import AttentionArgs, Config

BUCKETS = (16, 32, 64, 128, 256)
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Launch:
    """One launch of a jitted kernel over `programs` programs: its arguments in order, and its
    keywords (constexprs, options).

    Made of tensors on the "meta" device it can be compiled and not run (see
    `kernels.triton.compile`).
    """

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def run(self) -> None:
        """Launch it on the current device, if it has a program."""
        if self.programs:
            self.kernel[(self.programs,)](*self.arguments, **self.keywords)


_TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_COUNTS = ("heads_q", "heads_kv", "group", "seqlen_q", "seqlen_kv", "diagonal_low", "diagonal_high")
_TABLES = ("lse", "delta", "row_low", "row_high", "descale_q", "descale_k", "descale_v")


def twice(kernel: Any, *counts: str) -> tuple[Any, Any]:
    """The kernel for aligned tensors, which promises that their pointers, strides and head dims are
    multiples of 16, and in general.

    Without that promise Triton loads element by element and cannot copy asynchronously; with it
    baked in, only some tensors would do.  counts: further integers that no build depends on.
    """
    names = list(inspect.signature(kernel).parameters)
    free = [name for name in names if name in (*_COUNTS, *counts)]
    tables = [name for name in names if name in _TABLES]
    sizes = [name for name in names if name.startswith(("stride_", "head_dim"))]
    tensors = [name for name in names if name in _TENSORS]
    return (
        triton.jit(kernel, do_not_specialize=free, do_not_specialize_on_alignment=tables),
        triton.jit(
            kernel,
            do_not_specialize=[*free, *sizes],
            do_not_specialize_on_alignment=[*tables, *tensors],
        ),
    )


def head_dim_bucket(head_dim: int) -> int:
    """The tile width for a head dim: the next of BUCKETS."""
    return next(bucket for bucket in BUCKETS if head_dim <= bucket)


@dataclass(frozen=True)
class Blocks:
    """What a config becomes for one dtype and head dim."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @staticmethod
    def declared(config: Config) -> "Blocks":
        """As the config says; raises ValueError if it does not name all four."""
        chosen = config.block_m, config.block_n, config.num_warps, config.num_stages
        if None in chosen:
            raise ValueError(
                f"config: {config.name} must name block_m, block_n, num_warps and num_stages"
            )
        return Blocks(*chosen)

    def keywords(self, kind: str, bucket: int) -> dict[str, Any]:
        """The keywords of a launch for a kind of mask; one bucket for both head dims: a fifth of
        the builds that two would need, for padding where they differ."""
        return {
            "KIND": kind,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_D": bucket,
            "BLOCK_DV": bucket,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": False,
        }


def is_aligned(args: AttentionArgs, *others: Tensor) -> bool:
    """Whether the build may count on 16-byte pointers and on strides and head dims that are
    multiples of 16 elements.

    others: the tensors that the kernel reads or writes beside q, k and v.
    """
    tensors = (args.q, args.k, args.v, *others)
    return (
        all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        and all(stride % 16 == 0 for tensor in tensors for stride in tensor.stride()[:3])
        and args.head_dim % 16 == args.head_dim_v % 16 == 0
    )


def sizes(args: AttentionArgs) -> tuple[int, ...]:
    """Query heads, query heads per key head, and the lengths and head dims."""
    group = args.heads_q // args.heads_kv
    return args.heads_q, group, args.seqlen_q, args.seqlen_kv, args.head_dim, args.head_dim_v


def steps(*tensors: Tensor) -> tuple[int, ...]:
    """The strides of batch, head and sequence of each tensor, in elements."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])
