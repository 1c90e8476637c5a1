"""Faults of torch-level kernels: split-KV, its merge and its decode path; softcap; torch's own
kernels and their masks."""

from tests.faults.fault import SPLIT_KV, TRITON_DECODE, Fault

MATH = "kernels/torch/math.py"
CPU_FLASH = "kernels/torch/cpu_flash.py"
FLEX = "kernels/torch/flex_eager.py"
TORCH_COMMON = "kernels/torch/common.py"

PLAIN = "hq=2,hkv=2,sq=64,skv=128,d=64,dtype=float16"
ONE_PART = "hq=2,hkv=2,sq=64,skv=16,d=64,dtype=float16"
SQUARE = "hq=2,hkv=2,sq=128,skv=128,d=64,dtype=float16"

_MERGE_SHIFT = "maximum = lses.amax(0)\n    shift = maximum.masked_fill(maximum == -math.inf, 0.0)"
_PART_SHIFT = (
    "maximum = scores.amax(-1)\n    shift = maximum.masked_fill(maximum == -math.inf, 0.0)"
)
_MERGED = (
    "    out = (weights[..., None] * outs).sum(0)\n    return out / total.masked_fill(total == 0,"
    " 1.0)[..., None], "
)
_SOFTCAP = (
    "    if args.softcap:\n        scores = args.softcap * torch.tanh(scores / args.softcap)\n"
)
_MASKED = "    scores = scores.masked_fill(~seen, -math.inf)\n"

FAULTS = (
    Fault(
        name="merge-in-base-two",
        about="natural LSEs are merged as powers of two",
        source="sglang PR #35045",
        file=SPLIT_KV,
        edits=(("weights = torch.exp(lses - shift)", "weights = torch.exp2(lses - shift)"),),
        common=ONE_PART,
    ),
    Fault(
        name="merge-not-divided",
        about="the merged O is not divided by the sum of the weights",
        source="flashinfer 6cbaf6e26",
        file=SPLIT_KV,
        edits=((_MERGED, "    out = (weights[..., None] * outs).sum(0)\n    return out, "),),
        common=ONE_PART,
    ),
    Fault(
        name="merge-of-empty-parts",
        about="the maximum of parts that are all -inf is compared, and not replaced: NaN",
        source="flash-attention 31920dda",
        file=SPLIT_KV,
        edits=((_MERGE_SHIFT, "maximum = lses.amax(0)\n    shift = maximum"),),
        common=PLAIN,
    ),
    Fault(
        name="merge-lse-plus-infinity",
        about="where no part has a key the merged LSE is +inf",
        source="flash-attention 26d7d92f",
        file=SPLIT_KV,
        edits=(
            (
                f"{_MERGED}maximum + torch.log(total)",
                f"{_MERGED}(shift + torch.log(total)).masked_fill(total == 0, math.inf)",
            ),
        ),
        common=PLAIN,
    ),
    Fault(
        name="part-all-masked",
        about="a part of which a row sees no key subtracts -inf from -inf",
        source="xformers 63d7f30b",
        file=SPLIT_KV,
        edits=((_PART_SHIFT, "maximum = scores.amax(-1)\n    shift = maximum"),),
        common=PLAIN,
    ),
    Fault(
        name="parts-rounded-down",
        about=(
            "the length of a part is rounded down to a tile, so that the last keys belong to none"
        ),
        source="flashinfer 16cb9e493",
        file=SPLIT_KV,
        edits=(
            (
                "-(-args.seqlen_kv // (splits * TILE)) * TILE",
                "max(args.seqlen_kv // (splits * TILE), 1) * TILE",
            ),
        ),
        common="hq=2,hkv=2,sq=64,skv=160,d=64,dtype=float16",
    ),
    Fault(
        name="idle-parts-unwritten",
        about=(
            "parts without keys leave their scratch memory as it was, and are merged all the same"
        ),
        source="flashinfer ee3a7e822, flash-attention 1c275eb0",
        file=SPLIT_KV,
        edits=(("            outs[split], lses[split] = 0.0, -math.inf\n", ""),),
        common="hq=2,hkv=2,sq=64,skv=160,d=64,dtype=float16",
    ),
    Fault(
        name="decode-blocks-of-no-part",
        about="blocks that cannot be dealt out evenly belong to no part",
        source="flashinfer 16cb9e493",
        file=TRITON_DECODE,
        variant="triton-decode-forward",
        edits=(
            (
                "length = tl.cdiv(walk[3] - walk[0], PARTS)",
                "length = (walk[3] - walk[0]) // PARTS",
            ),
        ),
        common="hq=2,hkv=2,sq=4,skv=256,d=64,dtype=float16",
    ),
    Fault(
        name="decode-rows-of-one-head",
        about="rows past the first head of a group see what those of the first head see",
        source="none known",
        file=TRITON_DECODE,
        variant="triton-decode-forward",
        edits=(("row = packed % seqlen_q", "row = tl.minimum(packed, seqlen_q - 1)"),),
        common="hq=2,hkv=2,sq=4,skv=128,d=64,dtype=float16,mask=causal",
    ),
    Fault(
        name="decode-lse-of-parts-in-16-bits",
        about="the LSE of a part is kept in the inputs' dtype, as its O is",
        source="none known",
        file=TRITON_DECODE,
        variant="triton-decode-forward-16bit",
        edits=(
            (
                '"partial_lse": (rows, "float32"),',
                '"partial_lse": (rows, "float32" if stored == "float32" else dtype),',
            ),
        ),
        common="hq=2,hkv=2,sq=4,skv=256,d=64,dtype=float16",
    ),
    Fault(
        name="decode-merge-in-16-bits",
        about="parts that are kept in 16 bits are also added up in 16 bits",
        source="none known",
        file=TRITON_DECODE,
        variant="triton-decode-forward-16bit",
        edits=(
            (
                "acc += weight[:, None] * tl.load(o_rows, mask=mask, other=0.0).to(tl.float32)",
                (
                    "part_o = tl.load(o_rows, mask=mask, other=0.0).to(tl.float32)\n"
                    "        acc = (acc + weight[:, None] * part_o).to("
                    "partial_out.dtype.element_ty).to(tl.float32)"
                ),
            ),
        ),
        common="hq=2,hkv=2,sq=4,skv=256,d=64,dtype=float16",
    ),
    Fault(
        name="parts-in-output-dtype",
        about="the parts' O is rounded to the output's dtype before it is merged",
        source="none known",
        file=SPLIT_KV,
        edits=(("part.reshape(out.shape), ", "part.reshape(out.shape).to(out.dtype), "),),
        common=PLAIN,
    ),
    Fault(
        name="neighbours-row-sum",
        about="in decoding, a row's sum in the LSE is that of the next head of its group",
        source="flashinfer 6e3ea8fcc",
        file=SPLIT_KV,
        edits=(
            (
                "maximum + torch.log(total)\n\n\ndef merge",
                (
                    "maximum + torch.log(total.roll(-1, 2) if args.seqlen_q == 1 else"
                    " total)\n\n\ndef merge"
                ),
            ),
        ),
        common=PLAIN,
    ),
    Fault(
        name="softcap-after-mask",
        about="the softcap is applied behind the mask, and makes of -inf a score of -softcap",
        source="flashinfer f5f7a2a23",
        file=SPLIT_KV,
        edits=((_SOFTCAP, ""), (_MASKED, _MASKED + _SOFTCAP)),
        common=PLAIN,
    ),
    Fault(
        name="decode-skips-softcap",
        about="decoding leaves the softcap out",
        source="none known",
        file=SPLIT_KV,
        edits=(("    if args.softcap:\n", "    if args.softcap and args.seqlen_q > 1:\n"),),
        common=PLAIN,
    ),
    Fault(
        name="decode-skips-mask",
        about="decoding sees every key, whatever the mask says",
        source="flashinfer 7f33b2084",
        file=SPLIT_KV,
        edits=(
            (
                "    seen = args.mask.dense(args.batch, args.heads_q, 1, args.seqlen_kv)\n",
                (
                    "    seen = torch.ones(args.batch, args.heads_q, 1, args.seqlen_kv,"
                    " dtype=torch.bool)\n"
                ),
            ),
        ),
        common="hq=2,hkv=2,sq=1,skv=128,d=64,dtype=float16",
    ),
    Fault(
        name="decode-group-transposed",
        about="decoding takes the heads of a group for those of different groups",
        source="flashinfer 9b861cdbb",
        file=SPLIT_KV,
        edits=(
            (
                "args.q.float().reshape(args.batch, args.heads_kv, group, args.head_dim),",
                (
                    "args.q.float().reshape(args.batch, group, args.heads_kv,"
                    " args.head_dim).transpose(1, 2),"
                ),
            ),
        ),
        common="hq=4,hkv=4,sq=1,skv=128,d=64,dtype=float16",
    ),
    Fault(
        name="masked-v-spreads",
        about="masked rows of V enter the product, NaN as 0 * NaN",
        source="vllm PR #936, #47305",
        file=SPLIT_KV,
        edits=(("out = p @ v.masked_fill(~finite, 0.0)", "out = p @ v"),),
        common=PLAIN,
    ),
    Fault(
        name="grid-limit",
        about="sequences and heads past 65535 are silently left out",
        source="flashinfer #3125, xformers 503a5d77, pytorch #142228",
        file=SPLIT_KV,
        edits=(
            (
                "    out.copy_(merged)\n",
                (
                    "    for index in range(min(args.batch * args.heads_q, 65535)):\n       "
                    " out[divmod(index, args.heads_q)] = merged[divmod(index, args.heads_q)]\n"
                ),
            ),
        ),
        common=PLAIN,
        asked="b=65537,sq=2,skv=5,d=16,dtype=float32,seed=20",
    ),
    Fault(
        name="softcap-without-cap",
        about="the softcap is x tanh(x / c), not c tanh(x / c)",
        source="flash-attention #2396",
        file=FLEX,
        edits=(("return cap * torch.tanh(score / cap)", "return score * torch.tanh(score / cap)"),),
        common=SQUARE,
    ),
    Fault(
        name="block-mask-stale",
        about=(
            "a block mask is kept by its kind and lengths, and serves other masks of the same kind"
        ),
        source="flashinfer 82784bb11",
        file=FLEX,
        edits=(
            (
                "mod = args.mask.mod(*lengths, args.q.device)",
                (
                    "mod = _MODS.setdefault((args.mask.kind, lengths), args.mask.mod(*lengths,"
                    " args.q.device))"
                ),
            ),
            ("RAISES_OPERANDS =", "_MODS: dict = {}\nRAISES_OPERANDS ="),
        ),
        common=SQUARE,
    ),
    Fault(
        name="mask-of-finfo-min",
        about=(
            "masked scores are the least finite number, so that a row without a key becomes the"
            " mean of V"
        ),
        source="pytorch #109517",
        file=CPU_FLASH,
        variant="torch-cpu-flash-16bit",
        helper=TORCH_COMMON,
        edits=(
            (
                "device=args.q.device), -math.inf)",
                "device=args.q.device), torch.finfo(bias.dtype).min)",
            ),
        ),
        common=f"{SQUARE},mask=causal",
    ),
    Fault(
        name="mask-of-minus-1e4",
        about="masked scores are -10000, which valid scores fall below",
        source="flashinfer #4267",
        file=CPU_FLASH,
        variant="torch-cpu-flash-float32",
        helper=TORCH_COMMON,
        edits=(("device=args.q.device), -math.inf)", "device=args.q.device), -1.0e4)"),),
        common="hq=2,hkv=2,sq=128,skv=128,d=64,dtype=float32,mask=causal",
    ),
    Fault(
        name="causal-flag-for-any-causal",
        about=(
            "every causal mask is handed over as is_causal, which is aligned to the top left corner"
        ),
        source="flash-attention 9e5e8bc9",
        file=MATH,
        helper=TORCH_COMMON,
        edits=(
            (
                (
                    " and (\n        args.mask.alignment == alignment or args.seqlen_q =="
                    " args.seqlen_kv\n    )"
                ),
                "",
            ),
        ),
        common=f"{SQUARE},mask=causal",
    ),
)
