"""What the Triton variants share on the host: head-dim buckets, masks as a kernel takes them, the
aligned bit, a launch."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from references.masks import Causal, Full, Window
from verify.variant import AttentionArgs

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


def head_dim_bucket(head_dim: int) -> int:
    """The tile width for a head dim: the next of BUCKETS."""
    return next(bucket for bucket in BUCKETS if head_dim <= bucket)


@dataclass(frozen=True)
class MaskBuild:
    """A mask as the kernel takes it: its kind, and for "causal" and "window" the keys that row r
    sees: r + diagonal_low <= key <= r + diagonal_high.
    """

    kind: str
    diagonal_low: int = 0
    diagonal_high: int = 0


def mask_build(args: AttentionArgs) -> MaskBuild:
    """Fold causal and window parts into one band; anything else is read from a table of
    intervals."""
    lows: list[int] = []
    highs: list[int] = []
    for atom in args.mask.atoms:
        if isinstance(atom, Causal | Window):
            offset = args.seqlen_kv - args.seqlen_q if atom.alignment == "br" else 0
            left, right = (None, 0) if isinstance(atom, Causal) else (atom.left, atom.right)
            lows += [] if left is None else [offset - left]
            highs += [] if right is None else [offset + right]
        elif not isinstance(atom, Full):
            return MaskBuild("interval")
    kind = "window" if lows else "causal" if highs else "full"
    # Clamped to where a diagonal has left the score matrix: a window may be wider than 32 bits.
    nowhere_below, nowhere_above = -args.seqlen_q - 1, args.seqlen_kv
    low = max(nowhere_below, min(nowhere_above, max(lows, default=nowhere_below)))
    high = max(nowhere_below, min(nowhere_above, min(highs, default=nowhere_above)))
    return MaskBuild(kind, low, high)


def mask_tables(args: AttentionArgs, mask: MaskBuild) -> tuple[Tensor | None, Tensor | None]:
    """The visible keys [low, high) of every row, two contiguous int32 (batch, seqlen_q); None but
    for kind "interval"."""
    if mask.kind != "interval":
        return None, None
    low, high = args.mask.row_bounds(args.batch, args.seqlen_q, args.seqlen_kv, args.q.device)
    return low.contiguous(), high.contiguous()


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


def steps(*tensors: Tensor) -> tuple[int, ...]:
    """The strides of batch, head and sequence of each tensor, in elements."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])
