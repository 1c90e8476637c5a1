"""What the Triton variants share on the host: head-dim buckets, blocks, the aligned bit,
a launch."""

import inspect
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import triton
from torch import Tensor

from kernels.masks import MaskBuild
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
_TABLES = ("lse", "delta", "dq_sums", "partial_out", "partial_lse")


def twice(kernel: Any) -> tuple[Any, Any]:
    """The kernel for aligned tensors, which promises that their pointers are multiples of 16 bytes,
    and in general; `steps` and `head_dims` say it of strides and head dims.

    Without that promise Triton loads element by element and cannot copy asynchronously; with it
    baked in, only some tensors would do.
    """
    names = list(inspect.signature(kernel).parameters)
    counts = [name for name in names if name in _COUNTS]
    tables = [name for name in names if name in _TABLES]
    tensors = [name for name in names if name in _TENSORS]
    jit = partial(triton.jit, kernel, do_not_specialize=counts)
    return (
        jit(do_not_specialize_on_alignment=tables),
        triton.jit(
            kernel, do_not_specialize=counts, do_not_specialize_on_alignment=[*tables, *tensors]
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

    def keywords(self, kind: str, bucket: int, aligned: bool) -> dict[str, Any]:
        """The keywords of a launch for a kind of mask and an alignment; one bucket for both head
        dims: a fifth of the builds that two would need, for padding where they differ."""
        return {
            "KIND": kind,
            "ALIGNED": aligned,
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


def head_dims(args: AttentionArgs, *, aligned: bool) -> tuple[int, ...]:
    """The head dims, as `kernels.triton.tiles` reads them."""
    return _handed((args.head_dim, args.head_dim_v), aligned)


def counts(args: AttentionArgs, heads: int, mask: MaskBuild) -> tuple[int, ...]:
    """Heads of the tensor that programs own tiles of, query heads per key head, the lengths and the
    mask's diagonals."""
    group = args.heads_q // args.heads_kv
    return heads, group, args.seqlen_q, args.seqlen_kv, mask.diagonal_low, mask.diagonal_high


def steps(*tensors: Tensor, aligned: bool) -> tuple[tuple[int, ...], ...]:
    """The strides of batch, head and sequence of each tensor, in elements, handed over likewise."""
    return tuple(_handed(tensor.stride()[:3], aligned) for tensor in tensors)


def _handed(numbers: tuple[int, ...], aligned: bool) -> tuple[int, ...]:
    return numbers if aligned else tuple(16 * number for number in numbers)
