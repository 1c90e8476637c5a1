"""Faults of the Triton backward: masks and bounds, rows and heads, padding."""

from tests.faults.fault import BACKWARD_KERNELS, TRITON_BACKWARD, TRITON_TILES, Fault

SQUARE = "hq=2,hkv=2,sq=64,skv=64,d=64,dtype=float16"
CAUSAL = f"{SQUARE},mask=causal"

_MASKED_P = "                if EDGE == 1:\n                    p = tl.where(visible, p, 0.0)\n"
_DV = (
    "                dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile,"
    ' input_precision="ieee")\n'
)

FAULTS = (
    Fault(
        name="backward-always-causal",
        about="the backward masks causally even where the forward did not",
        source="triton #4541, #5660",
        file=TRITON_BACKWARD,
        edits=(
            (
                "    mask = mask_build(args)\n",
                (
                    '    mask = mask_build(replace(args, mask=Causal()) if args.mask.kind == "full"'
                    " else args)\n"
                ),
            ),
            (
                "from verify.variant import (",
                "from references.masks import Causal\nfrom verify.variant import (",
            ),
        ),
        common=CAUSAL,
    ),
    Fault(
        name="backward-top-left",
        about=(
            "the backward counts the diagonal from the top left corner, the forward from the"
            " last key"
        ),
        source="ffpa-attn PR #300",
        file=TRITON_BACKWARD,
        edits=(
            (
                "    mask = mask_build(args)\n",
                (
                    "    mask = mask_build(args)\n    mask = replace(mask,"
                    " diagonal_high=mask.diagonal_high - (args.seqlen_kv - args.seqlen_q))\n"
                ),
            ),
        ),
        common=CAUSAL,
    ),
    Fault(
        name="backward-skips-key-bound",
        about=(
            "the diagonal alone bounds a causal row, so that rows past the last key see keys that"
            " are not there"
        ),
        source="flash-attention c65b5106, #443",
        file=TRITON_BACKWARD,
        helper=TRITON_TILES,
        edits=(
            (
                "high = tl.minimum(row + (diagonal_high + 1), seqlen_kv)",
                "high = row + (diagonal_high + 1)",
            ),
        ),
        common=CAUSAL,
    ),
    Fault(
        name="dq-padding-overflows",
        about=(
            "hidden scores are multiplied by 0, not replaced: 2^(0 - LSE) overflows and gives NaN"
            " in dQ"
        ),
        source="pytorch #196678",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "                ds = tl.where(visible, ds, 0.0)\n            dq_tile",
                "                ds = ds * visible.to(tl.float32)\n            dq_tile",
            ),
        ),
        common=CAUSAL,
    ),
    Fault(
        name="dv-padding-overflows",
        about=(
            "hidden probabilities are multiplied by 0, not replaced: NaN in dV and dK where the LSE"
            " is very low"
        ),
        source="cudnn-frontend #1072",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(("p = tl.where(visible, p, 0.0)", "p = p * visible.to(tl.float32)"),),
        common=CAUSAL,
    ),
    Fault(
        name="padded-rows-counted",
        about="rows past the last one, which repeat it, count in dK and dV",
        source="flash-attention a4f148b6",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(("                    high = tl.where(rows < seqlen_q, high, 0)\n", ""),),
        common=SQUARE,
    ),
    Fault(
        name="dv-before-mask",
        about="dV is added up before P is masked",
        source="none known",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=((_MASKED_P + _DV, _DV + _MASKED_P),),
        common=SQUARE,
    ),
    Fault(
        name="window-last-rows-lost",
        about="a block of keys stops at the last row whose window reaches its first key",
        source="vllm #3385",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "last = tl.minimum(key_end - diagonal_low, seqlen_q)",
                "last = tl.minimum(key_begin - diagonal_low, seqlen_q)",
            ),
        ),
        common=CAUSAL,
    ),
    Fault(
        name="first-row-off-by-one",
        about=(
            "a block of keys starts one row behind the first that sees it, which shows where that"
            " row ends a block of rows"
        ),
        source="none known",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "first = tl.maximum(key_begin - diagonal_high, 0)",
                "first = tl.maximum(key_begin + 1 - diagonal_high, 0)",
            ),
        ),
        common=CAUSAL,
    ),
    Fault(
        name="diagonal-block-unmasked",
        about="blocks of rows on the diagonal count as seen whole",
        source="vllm PR #30887",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "inner_first = tl.maximum(key_end - 1 - diagonal_high, 0)",
                "inner_first = tl.maximum(key_begin - diagonal_high, 0)",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="scan-stops-at-1024-rows",
        about="which rows see a block of keys is looked up among the first 1024 only",
        source="pytorch #153799",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            ("for start in range(0, seqlen_q, SCANNED):", "for start in range(0, 1, SCANNED):"),
        ),
        common=SQUARE,
    ),
    Fault(
        name="scan-drops-last-row",
        about=(
            "the last row that sees a block of keys is dropped, which shows where it begins a block"
            " of rows"
        ),
        source="none known",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "lasts = tl.where(sees, scanned + 1, lasts)",
                "lasts = tl.where(sees, scanned, lasts)",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="dq-head-dim-by-32",
        about="dQ is summed over whole tiles of 32 columns of K only",
        source="flash-attention PR #2896",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "            k_mask = dims < head_dim\n            v_mask = dims_v < head_dim_v\n",
                (
                    "            k_mask = dims < head_dim // 32 * 32\n            v_mask = dims_v <"
                    " head_dim_v\n"
                ),
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="dv-stored-by-dk-columns",
        about="dV is stored with dK's number of columns",
        source="flash-attention #2552",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(("mask=written & (dims_v < head_dim_v)", "mask=written & (dims_v < head_dim)"),),
        common=SQUARE,
    ),
    Fault(
        name="out-strides-are-dout-strides",
        about="delta reads O with dO's strides",
        source="flash-attention 9ee0ff1d",
        file=TRITON_BACKWARD,
        edits=(("steps(saved.out, dout,", "steps(dout, dout,"),),
        common=SQUARE,
    ),
    Fault(
        name="dk-strides-are-k-strides",
        about="dK and dV are written with the strides of K and V, though these may be expanded",
        source="pytorch #146377",
        file=TRITON_BACKWARD,
        edits=(
            (
                "steps(*inputs, *outputs,",
                "steps(*inputs, *((args.k, args.v) if len(outputs) == 2 else outputs),",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="delta-of-first-block",
        about="every block of rows takes the delta of the first one",
        source="flash-attention b3f1b6a5",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "                delta_row = tl.load(delta + sums + row)\n",
                (
                    "                delta_row = tl.load(delta + sums + (row - (block - walk[0]) *"
                    " BLOCK_M))\n"
                ),
            ),
        ),
        common="hq=2,hkv=2,sq=16,skv=128,d=64,dtype=float16",
    ),
    Fault(
        name="delta-of-first-head",
        about="every head of a group takes the delta of the group's first one",
        source="flash-attention b3f1b6a5",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "                delta_row = tl.load(delta + sums + row)\n",
                "                delta_row = tl.load(delta + sums - member * seqlen_q + row)\n",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="first-head-of-group-only",
        about="dK and dV are summed over the first head of the group only",
        source="none known",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(("for member in range(group):", "for member in range(1):"),),
        common=SQUARE,
    ),
    Fault(
        name="dq-heads-interleaved",
        about="dQ reads key head h % heads_kv, right without groups",
        source="HipKittens PR #22",
        file=TRITON_BACKWARD,
        helper=BACKWARD_KERNELS,
        edits=(
            (
                "head_kv_64 = (head // group).to(tl.int64)",
                "head_kv_64 = (head % (heads_q // group)).to(tl.int64)",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="no-queries-no-gradients",
        about=(
            "the host returns at once where there are no queries, and leaves dK and dV as they were"
        ),
        source="flash-attention #2562",
        file=TRITON_BACKWARD,
        edits=(
            (
                "    kernels = launches("
                "args, saved, dout, gradients, workspace, mode, capability)\n",
                (
                    "    if not args.seqlen_q:\n        return\n"
                    "    kernels = launches("
                    "args, saved, dout, gradients, workspace, mode, capability)\n"
                ),
            ),
        ),
        common=SQUARE,
    ),
)
