"""A small FlashAttention forward in Triton, right and with one slip of algebra each, for FPSan.

It differs from the plain kernel as a kernel of the collection does: blocks of keys, a running
maximum, rescaled sums, tl.dot.  So the right one shows that FPSan calls equal what is equal.
"""

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.common import Launch
from tests.planted.plain import LOG2_E, matrices
from verify.variant import AttentionArgs, Contract, Support, Variant, Workspace

BLOCK_M, BLOCK_N = 32, 32
SUPPORT = Support(
    dtypes=("float16",), head_dims=(64,), masks=("full",), grouped_heads=False, devices=("cuda",)
)
# By variant: the slip, and what it does.
SLIPS = {
    "correct": "a small Triton forward without a slip",
    "swapped-operand": "takes its products of scores from V where K belongs",
    "wrong-scale": "scales the scores of one block of keys twice",
    "lost-block": "leaves out one block of keys",
    "stale-sum": "rescales O to a new maximum, and not the sum of its weights",
    "stale-output": "rescales the sum of the weights to a new maximum, and not O",
}


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_kv"])
def planted_algebra(  # noqa: PLR0917
    q,  # (matrices, rows, DIMS), contiguous; so k, v and out
    k,
    v,
    out,
    lse,  # float32 (matrices, seqlen_q)
    scale_log2: tl.float32,
    seqlen_q: tl.int32,
    seqlen_kv: tl.int32,
    SLIP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIMS: tl.constexpr,
):
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIMS)
    inside = (rows < seqlen_q)[:, None]
    places = matrix * seqlen_q * DIMS + rows[:, None] * DIMS + dims[None, :]
    q_tile = tl.load(q + places, mask=inside, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741 - the paper's name
    acc = tl.zeros([BLOCK_M, DIMS], tl.float32)
    end = seqlen_kv
    if SLIP == "lost-block":
        end -= BLOCK_N
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        mask = (keys < seqlen_kv)[:, None]
        of_block = matrix * seqlen_kv * DIMS + keys[:, None] * DIMS + dims[None, :]
        k_tile = tl.load(k + of_block, mask=mask, other=0.0)
        v_tile = tl.load(v + of_block, mask=mask, other=0.0)
        if SLIP == "swapped-operand":
            k_tile = v_tile
        x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        if SLIP == "wrong-scale":
            x = tl.where(start == BLOCK_N, x * scale_log2, x)
        x = tl.where((keys < seqlen_kv)[None, :], x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(x - m_new[:, None])
        if SLIP == "stale-sum":
            l += tl.sum(p, 1)  # noqa: E741
        else:
            l = l * alpha + tl.sum(p, 1)  # noqa: E741
        if SLIP != "stale-output":
            acc *= alpha[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        m = m_new
    tl.store(out + places, (acc / l[:, None]).to(out.dtype.element_ty), mask=inside)
    total = 0.6931471805599453 * (m + tl.log2(l))
    tl.store(lse + matrix * seqlen_q + rows, total, mask=rows < seqlen_q)


def launch_of(slip: str, tensors: Sequence[Tensor], lse: Tensor, softmax_scale: float) -> Launch:
    """How q, k, v and out, (matrices, rows, dims), are given to the kernel of that slip."""
    q, k, _, _ = tensors
    matrices_, rows, dims = q.shape
    sizes = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "DIMS": dims, "enable_fp_fusion": False}
    return Launch(
        planted_algebra,
        matrices_ * triton.cdiv(rows, BLOCK_M),
        (*tensors, lse, softmax_scale * LOG2_E, rows, k.shape[1]),
        {"SLIP": slip, **sizes},
    )


def forward(
    slip: str, args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace
) -> None:
    """The entry point of that slip."""
    SUPPORT.check(args, out)
    assert lse is not None
    given = matrices(args.q), matrices(args.k), matrices(args.v)
    with torch.cuda.device_of(args.q):
        own = torch.empty_like(given[0])
        launch_of(slip, (*given, own), lse, args.softmax_scale).run()
        out.copy_(own.view(out.shape))


VARIANTS = [
    Variant(
        name=f"planted-algebra-{slip}",
        family="planted",
        forward=partial(forward, slip),
        support=SUPPORT,
        contract=Contract(lse="natural"),
    )
    for slip in SLIPS
]
