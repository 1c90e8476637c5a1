"""Faults of strides, heads, scales and caches on the way into the Triton forward."""

from tests.faults.fault import TRITON_COMMON, TRITON_FORWARD, Fault
from tests.faults.masks import SQUARE

FAULTS = (
    Fault(
        name="v-strides-are-k-strides",
        about="V is read with K's strides",
        source="flash-attention bdda7481, #2665",
        file=TRITON_FORWARD,
        edits=(("steps(args.q, args.k, args.v, out,", "steps(args.q, args.k, args.k, out,"),),
        common=SQUARE,
    ),
    Fault(
        name="out-assumed-contiguous",
        about="rows of O are taken to lie head_dim_v apart",
        source="flash-attention bdda7481",
        file=TRITON_FORWARD,
        edits=(
            (
                "steps[3], row, ALIGNED)",
                "(0, 0, head_dim_v if ALIGNED else head_dim_v * 16), row, ALIGNED)",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="lse-rows-padded",
        about="heads of the LSE are taken to lie a multiple of the tile apart",
        source="flash-attention PR #2388",
        file=TRITON_FORWARD,
        edits=(
            (
                "tl.store(lse + (batch * heads_q + head) * seqlen_q",
                "tl.store(lse + (batch * heads_q + head) * tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="head-offset-by-division",
        about=(
            "the head's offset goes through a division by the row's stride, which is 0 where heads"
            " lie inside rows"
        ),
        source="attorch #14",
        file=TRITON_FORWARD,
        edits=(
            (
                "head_of(q, steps[0],",
                "head_of(q, (steps[0][0], steps[0][1] // steps[0][2] * steps[0][2]),",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="stride-zero-is-unset",
        about=(
            "a stride of 0 is taken for one that was not given, so that expanded tensors are read"
            " beside their memory"
        ),
        source="pytorch #191937",
        file=TRITON_FORWARD,
        helper=TRITON_COMMON,
        edits=(
            (
                "_handed(tensor.stride()[:3], aligned)",
                (
                    "_handed(tuple(stride or tensor.shape[2] * tensor.shape[3] for stride in"
                    " tensor.stride()[:3]), aligned)"
                ),
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="heads-divided-by-key-heads",
        about="the key head is h // heads_kv, right only where heads_kv equals the group",
        source="HipKittens PR #22",
        file=TRITON_FORWARD,
        edits=(("(head // group).to(tl.int64)", "(head // (heads_q // group)).to(tl.int64)"),),
        common="hq=4,hkv=2,sq=128,skv=128,d=64,dtype=float16",
    ),
    Fault(
        name="heads-interleaved",
        about="the key head is h % heads_kv, right without groups",
        source="HipKittens PR #22",
        file=TRITON_FORWARD,
        edits=(("(head // group).to(tl.int64)", "(head % (heads_q // group)).to(tl.int64)"),),
        common=SQUARE,
    ),
    Fault(
        name="scale-hardcoded",
        about="the scale is 1 / sqrt(head_dim), whatever was asked for",
        source="flashinfer fc62e3f2f",
        file=TRITON_FORWARD,
        edits=(("args.softmax_scale * LOG2_E", "args.head_dim**-0.5 * LOG2_E"),),
        common=SQUARE,
    ),
    Fault(
        name="scale-zero-is-unset",
        about="a scale of 0 is taken for one that was not given",
        source="none known",
        file=TRITON_FORWARD,
        edits=(
            ("args.softmax_scale * LOG2_E", "(args.softmax_scale or args.head_dim**-0.5) * LOG2_E"),
        ),
        common=SQUARE,
    ),
    Fault(
        name="scale-stale",
        about="the scale of the first launch is kept for every later one of the same shapes",
        source="flashinfer 82784bb11",
        file=TRITON_FORWARD,
        edits=(
            (
                "args.softmax_scale * LOG2_E",
                (
                    "_SCALES.setdefault((args.q.shape, args.k.shape, args.dtype),"
                    " args.softmax_scale * LOG2_E)"
                ),
            ),
            (
                "aligned, general = twice(",
                "_SCALES: dict = {}\naligned, general = twice(",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="reads-past-head-dim",
        about=(
            "rows of Q are loaded as wide as the tile; K's zeros meet what lies behind them as 0"
            " * NaN"
        ),
        source="flashinfer cb5462df0",
        file=TRITON_FORWARD,
        edits=(
            (
                "mask=dims[None, :] < head_dim, other=0.0)",
                "mask=dims[None, :] < BLOCK_D, other=0.0)",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="writes-past-head-dim",
        about="rows of O are stored as wide as the tile",
        source="flash-attention #2552",
        file=TRITON_FORWARD,
        edits=(
            (
                "valid[:, None] & (dims_v[None, :] < head_dim_v)",
                "valid[:, None] & (dims_v[None, :] < BLOCK_DV)",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="adds-to-output",
        about="O is added to what the buffer held",
        source="none known",
        file=TRITON_FORWARD,
        edits=(
            (
                "tl.store(o_rows + dims_v[None, :], o_tile.to(out.dtype.element_ty), mask=o_mask)",
                (
                    "before = tl.load(o_rows + dims_v[None, :], mask=o_mask,"
                    " other=0.0).to(tl.float32)\n    tl.store(o_rows + dims_v[None, :], (before +"
                    " o_tile).to(out.dtype.element_ty), mask=o_mask)"
                ),
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="lse-of-last-tile-unwritten",
        about="the LSE is stored by whole tiles of rows only",
        source="flashinfer ee3a7e822",
        file=TRITON_FORWARD,
        edits=(("lse_rows, mask=valid)", "lse_rows, mask=rows < seqlen_q // BLOCK_M * BLOCK_M)"),),
        common=SQUARE,
    ),
)
