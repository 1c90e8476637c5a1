"""Faults of masks, bounds, empty rows and -inf in the Triton forward."""

from tests.faults.fault import KERNEL_MASKS, TRITON_FORWARD, TRITON_TILES, Fault

SQUARE = "hq=2,hkv=2,sq=128,skv=128,d=64,dtype=float16"
CAUSAL = f"{SQUARE},mask=causal"

# As the shipped kernel has it, line breaks included.
_SEEN = """x = tl.where(
                    (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]),
                    x,
                    """

FAULTS = (
    Fault(
        name="causal-top-left",
        about="causal masks are aligned to the top left corner, not to the last key",
        source="flash-attention 9e5e8bc9",
        file=TRITON_FORWARD,
        helper=KERNEL_MASKS,
        edits=(
            (
                'offset = args.seqlen_kv - args.seqlen_q if atom.alignment == "br" else 0',
                "offset = 0",
            ),
        ),
        common=CAUSAL,
    ),
    Fault(
        name="guard-inverted",
        about=(
            "the host's guard refuses causal problems with more keys than queries, the valid ones"
        ),
        source="flashinfer 8c8afabd2",
        file=TRITON_FORWARD,
        helper=KERNEL_MASKS,
        edits=(
            (
                "        if isinstance(atom, Causal | Window):",
                (
                    "        if isinstance(atom, Causal) and args.seqlen_kv > args.seqlen_q:\n"
                    '            raise Unsupported("seqlen_kv", "more keys than queries")\n'
                    "        if isinstance(atom, Causal | Window):"
                ),
            ),
        ),
        common=CAUSAL,
    ),
    Fault(
        name="causal-skips-key-bound",
        about=(
            "the diagonal alone bounds a causal row, so that rows past the last key read beyond it"
        ),
        source="flash-attention c65b5106, #443",
        file=TRITON_FORWARD,
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
        name="window-left-off-by-one",
        about="a window loses its leftmost key",
        source="vllm #3385",
        file=TRITON_FORWARD,
        helper=TRITON_TILES,
        edits=(
            (
                "low = tl.maximum(row + diagonal_low, 0)",
                "low = tl.maximum(row + (diagonal_low + 1), 0)",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="window-right-exclusive",
        about="a window's right side is taken as exclusive where it is not 0",
        source="vllm #3385",
        file=TRITON_FORWARD,
        helper=KERNEL_MASKS,
        edits=(("[offset + right]", "[offset + max(right - 1, 0)]"),),
        common=f"{SQUARE},mask=window.16.0",
    ),
    Fault(
        name="window-unbounded-is-minus-one",
        about="a side without bound is passed as -1, which the kernel takes for a width",
        source="TransformerEngine #3528",
        file=TRITON_FORWARD,
        helper=KERNEL_MASKS,
        edits=(
            (
                "else (atom.left, atom.right)",
                "else (-1 if atom.left is None else atom.left, atom.right)",
            ),
        ),
        common=f"{SQUARE},mask=window.16.0",
    ),
    Fault(
        name="window-left-edge-unmasked",
        about="blocks that the first row's window enters count as seen whole by every row",
        source="vllm PR #30887",
        file=TRITON_FORWARD,
        helper=TRITON_TILES,
        edits=(("tl.cdiv(tl.max(low, 0), BLOCK_N)", "tl.cdiv(tl.min(low, 0), BLOCK_N)"),),
        common=SQUARE,
    ),
    Fault(
        name="window-first-block-lost",
        about="the walk begins at the first block that lies wholly behind the window's edge",
        source="none known",
        file=TRITON_FORWARD,
        helper=TRITON_TILES,
        edits=(("begin = first // BLOCK_N", "begin = tl.cdiv(first, BLOCK_N)"),),
        common=SQUARE,
    ),
    Fault(
        name="last-block-unmasked",
        about="a block of keys that ends past the last one counts as seen whole",
        source="flashinfer 16cb9e493",
        file=TRITON_FORWARD,
        helper=TRITON_TILES,
        edits=(("tl.min(high, 0) // BLOCK_N", "tl.cdiv(tl.min(high, 0), BLOCK_N)"),),
        common=SQUARE,
    ),
    Fault(
        name="boundary-mask-skipped",
        about="without a mask the keys past the end keep the score 0, which scales O down",
        source="flashinfer 7f33b2084",
        file=TRITON_FORWARD,
        edits=(
            (
                f"if EDGE == 1:\n                {_SEEN}",
                f'if EDGE == 1 and KIND != "full":\n                {_SEEN}',
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="tail-of-v-not-zeroed",
        about="rows of V past the end are loaded, and enter P V as 0 * NaN",
        source="flashinfer cb5462df0, vllm PR #936",
        file=TRITON_FORWARD,
        edits=(("                v_mask = v_mask & loaded[:, None]\n", ""),),
        common=SQUARE,
    ),
    Fault(
        name="tail-of-k-read",
        about=(
            "rows of K past the end are loaded; their scores are masked, so that no result shows it"
        ),
        source="xformers 3e4a1b4b",
        file=TRITON_FORWARD,
        edits=(("                k_mask = k_mask & loaded[:, None]\n", ""),),
        common=SQUARE,
        escapes=(
            "a read that changes no result; memcheck sees one on a GPU, where each tensor ends its"
            " allocation (docs/sanitizers.md, planted-overread), and the interpreter has no such"
            " bounds"
        ),
    ),
    Fault(
        name="empty-tile-unwritten",
        about="a tile of rows without a block of keys returns before it writes",
        source="flashinfer 480d1ae00",
        file=TRITON_FORWARD,
        edits=(("valid = rows < seqlen_q", "valid = (rows < seqlen_q) & (walk[0] < walk[3])"),),
        common=CAUSAL,
    ),
    Fault(
        name="empty-row-finite-lse",
        about="a row without a key gets the LSE 0",
        source="flashinfer #4452",
        file=TRITON_FORWARD,
        edits=(
            ("(m + tl.log2(denominator))", "(tl.where(l == 0.0, 0.0, m) + tl.log2(denominator))"),
        ),
        common=CAUSAL,
    ),
    Fault(
        name="sentinel-1e30",
        about="masked scores are -1e30, so that a row without a key becomes the mean of V",
        source="onnxruntime #28904",
        file=TRITON_FORWARD,
        edits=((f'{_SEEN}float("-inf")', f"{_SEEN}-1.0e30"),),
        common=CAUSAL,
    ),
    Fault(
        name="sentinel-5e4",
        about="masked scores are -5e4, which valid scores fall below",
        source="flashinfer #4267",
        file=TRITON_FORWARD,
        edits=((f'{_SEEN}float("-inf")', f"{_SEEN}-5.0e4"),),
        common=CAUSAL,
    ),
    Fault(
        name="maximum-starts-at-zero",
        about="the running maximum starts at 0, so that rows with low scores only underflow",
        source="pytorch #193893",
        file=TRITON_FORWARD,
        edits=(
            (
                'm = tl.full([BLOCK_M], float("-inf"), tl.float32)',
                "m = tl.zeros([BLOCK_M], tl.float32)",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="infinity-minus-infinity",
        about="a row that sees no key of the first block subtracts -inf from -inf",
        source="flashinfer d7f2c6464, xformers 540fcbfd",
        file=TRITON_FORWARD,
        edits=(('shift = tl.where(m_new == float("-inf"), 0.0, m_new)', "shift = m_new"),),
        common=CAUSAL,
    ),
    Fault(
        name="lengths-of-first-sequence",
        about="every sequence ends where the first one does",
        source="none known",
        file=TRITON_FORWARD,
        helper=TRITON_TILES,
        edits=(
            (
                "high = tl.load(tables[1] + batch * seqlen_q + row)",
                "high = tl.load(tables[1] + row)",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="column-in-16-bits",
        about="the column is compared with its bound in 16 bits",
        source="xformers #719",
        file=TRITON_FORWARD,
        edits=(("(key[None, :] < high[:, None])", "(key.to(tl.int16)[None, :] < high[:, None])"),),
        common=CAUSAL,
    ),
    Fault(
        name="no-keys-no-output",
        about="the host returns at once where there are no keys, and leaves O and LSE as they were",
        source="flash-attention a3a257c7, #2503",
        file=TRITON_FORWARD,
        edits=(
            (
                "    kernel = launch(args, out, lse)\n",
                "    if not args.seqlen_kv:\n        return\n    kernel = launch(args, out, lse)\n",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="support-unchecked",
        about="the host no longer checks its arguments, so that a softcap is silently ignored",
        source="none known",
        file=TRITON_FORWARD,
        edits=(("    SUPPORT.check(args, out)\n", ""),),
        common=SQUARE,
    ),
)
