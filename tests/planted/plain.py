"""Plain attention in Triton, for comparison under FPSan: no tiles of several warps, no running
maximum, no pipeline.

The scores of a row are computed three times: for the maximum, for the sum, for the output.  Their
algebra is that of the collection's kernels:

    x   = (softmax_scale log2 e) (q . k)        m = max x
    p   = 2^(x - m) where the row sees the key, and 0 elsewhere
    l   = sum p                                  O = (sum round(p) v) / l
    LSE = m + log2 l in base 2, or ln 2 times that

and of a backward, from the saved O and LSE:

    P  = 2^(x - LSE log2 e), 0 where not seen    delta = sum dO O
    dS = P (dO . V - delta)                      dV = sum round(P) dO
    dQ = scale sum round(dS) K                   dK = scale sum round(dS) Q

Under FPSan numbers are integers, and these are equal in every bit whatever the tiles, order and
rescaling of a kernel are (docs/sanitizers.md).  Products are of fp32 numbers, into which a 16-bit
one is extended: FPSan's products of 16 bits extend them likewise.
"""

import math
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify.variant import (
    AttentionArgs,
    Contract,
    GradientNumerics,
    Gradients,
    Numerics,
    Saved,
    Support,
    Variant,
    Workspace,
)

ROWS, KEYS = 16, 16  # of one step
LOG2_E = math.log2(math.e)
MASKS = ("full", "causal", "causal.tl", "window", "lengths", "documents", "prefix")
SUPPORT = Support(
    dtypes=("float16", "bfloat16", "float32"),
    head_dims=range(1, 129),
    masks=MASKS,
    intersections=True,
    grouped_heads=True,
    separate_head_dim_v=True,
)
# 8 bits for the LSE alone, which is made of scores in fp32: P is not cut as those kernels cut it.
FORWARD_SUPPORT = replace(
    SUPPORT,
    dtypes=(*SUPPORT.dtypes, "float8_e4m3fn", "float8_e5m2"),
    dtypes_out=("float16",),
    storages=("strided", "transposedv"),
)


@triton.jit
def _tile(pointer, rows, length, dims, head_dim):
    """Rows of a contiguous (length, head_dim), 0 past its end, in fp32."""
    inside = (rows < length)[:, None] & (dims < head_dim)[None, :]
    places = pointer + rows[:, None] * head_dim + dims[None, :]
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _products(a, b):
    """The products (rows, keys) of (rows, dims) and (keys, dims)."""
    return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit
def _weighted(weights, values):
    """The sums (rows, dims) of (keys, dims), by weights (rows, keys)."""
    return tl.dot(weights, values, input_precision="ieee")


@triton.jit
def _sees(seen, rows, keys, seqlen_q, seqlen_kv):
    """Whether each row sees each key; no row past the end does, and none sees a key past it."""
    inside = (rows < seqlen_q)[:, None] & (keys < seqlen_kv)[None, :]
    places = seen + rows[:, None] * seqlen_kv + keys[None, :]
    return (tl.load(places, mask=inside, other=0) != 0) & inside


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_kv", "head_dim", "head_dim_v"])
def plain_forward(  # noqa: PLR0917
    q,  # (matrices, seqlen_q, head_dim), contiguous; so k, v and out, with as many matrices
    k,
    v,
    seen,  # uint8 (matrices, seqlen_q, seqlen_kv)
    out,
    lse,  # float32 (matrices, seqlen_q), or None
    scale_log2: tl.float32,
    seqlen_q: tl.int32,
    seqlen_kv: tl.int32,
    head_dim: tl.int32,
    head_dim_v: tl.int32,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_V: tl.constexpr,
    BASE2: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    dims_v = tl.arange(0, DIMS_V)
    seen += matrix * seqlen_q * seqlen_kv
    k += matrix * seqlen_kv * head_dim
    v += matrix * seqlen_kv * head_dim_v
    q_tile = _tile(q + matrix * seqlen_q * head_dim, rows, seqlen_q, dims, head_dim)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    for start in range(0, seqlen_kv, KEYS):
        keys = start + tl.arange(0, KEYS)
        x = _products(q_tile, _tile(k, keys, seqlen_kv, dims, head_dim)) * scale_log2
        x = tl.where(_sees(seen, rows, keys, seqlen_q, seqlen_kv), x, float("-inf"))
        m = tl.maximum(m, tl.max(x, 1))
    shift = tl.where(m == float("-inf"), 0.0, m)

    l = tl.zeros([ROWS], tl.float32)  # noqa: E741 - the paper's name
    acc = tl.zeros([ROWS, DIMS_V], tl.float32)
    for start in range(0, seqlen_kv, KEYS):
        keys = start + tl.arange(0, KEYS)
        x = _products(q_tile, _tile(k, keys, seqlen_kv, dims, head_dim)) * scale_log2
        p = tl.exp2(x - shift[:, None])
        p = tl.where(_sees(seen, rows, keys, seqlen_q, seqlen_kv), p, 0.0)
        l += tl.sum(p, 1)  # noqa: E741
        rounded = p.to(v.dtype.element_ty).to(tl.float32)
        acc += _weighted(rounded, _tile(v, keys, seqlen_kv, dims_v, head_dim_v))

    denominator = tl.where(l == 0.0, 1.0, l)
    inside = (rows < seqlen_q)[:, None] & (dims_v < head_dim_v)[None, :]
    places = out + matrix * seqlen_q * head_dim_v + rows[:, None] * head_dim_v + dims_v[None, :]
    tl.store(places, (acc / denominator[:, None]).to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        total = m + tl.log2(denominator)
        if not BASE2:
            total = 0.6931471805599453 * total
        tl.store(lse + matrix * seqlen_q + rows, total, mask=rows < seqlen_q)


@triton.jit
def _gradient_of_scores(q_tile, k_tile, v_tile, o_tile, do_tile, lse_rows, sees, scale_log2):
    """P and dS (rows, keys)."""
    shift = tl.where(lse_rows == float("-inf"), 0.0, lse_rows * 1.4426950408889634)
    delta = tl.sum(o_tile * do_tile, 1)
    p = tl.exp2(_products(q_tile, k_tile) * scale_log2 - shift[:, None])
    p = tl.where(sees, p, 0.0)
    ds = p * (_products(do_tile, v_tile) - delta[:, None])
    return p, tl.where(sees, ds, 0.0)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_kv", "head_dim", "head_dim_v", "group"])
def plain_backward(  # noqa: PLR0915, PLR0917
    q,  # (batch heads_q, seqlen_q, head_dim), contiguous; so out, dout and dq
    k,  # (batch heads_kv, seqlen_kv, head_dim), contiguous; so v, dk and dv
    v,
    seen,  # uint8 (batch heads_q, seqlen_q, seqlen_kv)
    out,
    dout,
    lse,  # float32 (batch heads_q, seqlen_q)
    dq,  # one of dq, and dk with dv, is None
    dk,
    dv,
    scale_log2: tl.float32,
    scale: tl.float32,
    seqlen_q: tl.int32,
    seqlen_kv: tl.int32,
    head_dim: tl.int32,
    head_dim_v: tl.int32,
    group: tl.int32,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_V: tl.constexpr,
):
    dims = tl.arange(0, DIMS)
    dims_v = tl.arange(0, DIMS_V)
    if dq is not None:
        matrix = tl.program_id(1).to(tl.int64)
        first_row = tl.program_id(0) * ROWS
        last_row = first_row + ROWS
        first_key = tl.program_id(0) * 0
        last_key = seqlen_kv
        first_head = matrix
        heads = 1
        matrix_kv = matrix // group
    else:
        matrix_kv = tl.program_id(1).to(tl.int64)
        first_key = tl.program_id(0) * KEYS
        last_key = first_key + KEYS
        first_row = tl.program_id(0) * 0
        last_row = seqlen_q
        first_head = matrix_kv * group
        heads = group
    dq_tile = tl.zeros([ROWS, DIMS], tl.float32)
    dk_tile = tl.zeros([KEYS, DIMS], tl.float32)
    dv_tile = tl.zeros([KEYS, DIMS_V], tl.float32)
    dtype = q.dtype.element_ty
    for member in range(heads):
        head = first_head + member
        for row_start in range(first_row, last_row, ROWS):
            rows = row_start + tl.arange(0, ROWS)
            q_tile = _tile(q + head * seqlen_q * head_dim, rows, seqlen_q, dims, head_dim)
            shape_out = head * seqlen_q * head_dim_v
            o_tile = _tile(out + shape_out, rows, seqlen_q, dims_v, head_dim_v)
            do_tile = _tile(dout + shape_out, rows, seqlen_q, dims_v, head_dim_v)
            lse_rows = tl.load(lse + head * seqlen_q + rows, mask=rows < seqlen_q, other=0.0)
            for start in range(first_key, last_key, KEYS):
                keys = start + tl.arange(0, KEYS)
                shape_kv = matrix_kv * seqlen_kv
                k_tile = _tile(k + shape_kv * head_dim, keys, seqlen_kv, dims, head_dim)
                v_tile = _tile(v + shape_kv * head_dim_v, keys, seqlen_kv, dims_v, head_dim_v)
                of_head = seen + head * seqlen_q * seqlen_kv
                sees = _sees(of_head, rows, keys, seqlen_q, seqlen_kv)
                p, ds = _gradient_of_scores(
                    q_tile, k_tile, v_tile, o_tile, do_tile, lse_rows, sees, scale_log2
                )
                ds = ds.to(dtype).to(tl.float32)
                if dq is not None:
                    dq_tile += _weighted(ds, k_tile)
                else:
                    dk_tile += _weighted(tl.trans(ds), q_tile)
                    dv_tile += _weighted(tl.trans(p.to(dtype).to(tl.float32)), do_tile)
    if dq is not None:
        rows = first_row + tl.arange(0, ROWS)
        inside = (rows < seqlen_q)[:, None] & (dims < head_dim)[None, :]
        places = dq + matrix * seqlen_q * head_dim + rows[:, None] * head_dim + dims[None, :]
        tl.store(places, (dq_tile * scale).to(dtype), mask=inside)
    else:
        keys = first_key + tl.arange(0, KEYS)
        written = (keys < seqlen_kv)[:, None]
        inside = written & (dims < head_dim)[None, :]
        places = dk + matrix_kv * seqlen_kv * head_dim + keys[:, None] * head_dim + dims[None, :]
        tl.store(places, (dk_tile * scale).to(dtype), mask=inside)
        inside = written & (dims_v < head_dim_v)[None, :]
        places = dv + matrix_kv * seqlen_kv * head_dim_v
        places += keys[:, None] * head_dim_v + dims_v[None, :]
        tl.store(places, dv_tile.to(dtype), mask=inside)


def seen_of(args: AttentionArgs) -> Tensor:
    """Whether each row sees each key: uint8 (batch heads_q, seqlen_q, seqlen_kv)."""
    shape = args.batch, args.heads_q, args.seqlen_q, args.seqlen_kv
    return args.mask.dense(*shape, device=args.q.device).reshape(-1, *shape[2:]).to(torch.uint8)


def sizes_of(args: AttentionArgs) -> dict[str, int]:
    """The constants of a launch."""
    return {
        "ROWS": ROWS,
        "KEYS": KEYS,
        "DIMS": max(16, triton.next_power_of_2(args.head_dim)),
        "DIMS_V": max(16, triton.next_power_of_2(args.head_dim_v)),
        "enable_fp_fusion": False,
    }


def matrices(tensor: Tensor, repeats: int = 1) -> Tensor:
    """(batch, heads, rows, dims) as contiguous (batch heads repeats, rows, dims)."""
    bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    whole = bits.repeat_interleave(repeats, 1) if repeats > 1 else bits
    return whole.reshape(-1, *tensor.shape[2:]).contiguous().view(tensor.dtype)


def forward(
    base2: bool, args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace
) -> None:
    """Write O to `out` and the LSE to `lse`, in base 2 or as a natural logarithm."""
    FORWARD_SUPPORT.check(args, out)
    group = args.heads_q // args.heads_kv
    v = args.stored["v"].tensors[""].mT if "v" in args.stored else args.v
    given = matrices(args.q), matrices(args.k, group), matrices(v, group)
    with torch.cuda.device_of(args.q):
        plain = torch.empty_like(matrices(out))
        plain_forward[triton.cdiv(args.seqlen_q, ROWS), plain.shape[0]](
            *given,
            *(seen_of(args), plain, lse),
            args.softmax_scale * LOG2_E,
            *(args.seqlen_q, args.seqlen_kv, args.head_dim, args.head_dim_v),
            **sizes_of(args),
            BASE2=base2,
        )
        out.copy_(plain.view(out.shape))


def backward(
    args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients, workspace: Workspace
) -> None:
    """Write dQ, dK and dV from a saved O and natural-log LSE."""
    SUPPORT.check_backward(args, saved, dout, gradients)
    given = matrices(args.q), matrices(args.k), matrices(args.v)
    numbers = (
        *(args.softmax_scale * LOG2_E, args.softmax_scale, args.seqlen_q, args.seqlen_kv),
        *(args.head_dim, args.head_dim_v, args.heads_q // args.heads_kv),
    )
    with torch.cuda.device_of(args.q):
        read = seen_of(args), matrices(saved.out), matrices(dout), saved.lse
        dq, dk, dv = (torch.empty_like(matrix) for matrix in given)
        tiles = triton.cdiv(args.seqlen_q, ROWS), triton.cdiv(args.seqlen_kv, KEYS)
        keywords = sizes_of(args)
        plain_backward[tiles[0], dq.shape[0]](*given, *read, dq, None, None, *numbers, **keywords)
        plain_backward[tiles[1], dk.shape[0]](*given, *read, None, dk, dv, *numbers, **keywords)
        shaped = [own.view(like.shape) for own, like in ((dq, args.q), (dk, args.k), (dv, args.v))]
        gradients.copy_(*shaped)


FORWARDS = {
    lse: Variant(
        name=f"plain-forward-{lse}",
        family="planted",
        forward=partial(forward, lse == "base2"),
        support=FORWARD_SUPPORT,
        numerics=Numerics(),
        contract=Contract(lse=lse),
    )
    for lse in ("natural", "base2")
}
BACKWARD = Variant(
    name="plain-backward",
    family="planted",
    backward=backward,
    saved_by=FORWARDS["natural"],
    support=SUPPORT,
    gradients=GradientNumerics(),
)
VARIANTS = [*FORWARDS.values(), BACKWARD]
