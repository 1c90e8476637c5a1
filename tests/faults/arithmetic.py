"""Faults of the arithmetic of the Triton forward: LSE, rescaling, dtypes, exponentials, epsilons,
clamps."""

from tests.faults.fault import TRITON_FORWARD, Fault
from tests.faults.masks import SQUARE

ONE_BLOCK = "hq=2,hkv=2,sq=32,skv=32,d=64,dtype=float16"
SINGLE = "hq=2,hkv=2,sq=128,skv=128,d=64,dtype=float32"

_SCORES = 'x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2'
_SUM = "l = l * alpha + tl.sum(p, 1)"
_PROBABILITY = "p = tl.exp2(x - shift[:, None])"
_PRODUCT = 'acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")'
_POLYNOMIAL = (
    "t = tl.maximum(x - shift[:, None], -127.0)\n            f = t - tl.floor(t)\n            p ="
    " tl.exp2(tl.floor(t)) * (1.0 + f * (0.695146 + f * (0.227564 + f * 0.077119)))\n            p"
    ' = tl.where(x == float("-inf"), 0.0, p)'
)
_LSE = "lse_rows = 0.6931471805599453 * (m + tl.log2(denominator))"
_DIVISION = "o_tile = acc / denominator[:, None]"

FAULTS = (
    Fault(
        name="lse-base-two",
        about="the LSE is a base-2 logarithm, though natural is declared",
        source="flashinfer 23413e00a",
        file=TRITON_FORWARD,
        edits=((_LSE, "lse_rows = m + tl.log2(denominator)"),),
        common=SQUARE,
    ),
    Fault(
        name="lse-scaled-twice",
        about="the maximum in the LSE is multiplied by the scale again",
        source="flash-sparse-attention PR #106",
        file=TRITON_FORWARD,
        edits=((_LSE, "lse_rows = 0.6931471805599453 * (m * scale_log2 + tl.log2(denominator))"),),
        common=SQUARE,
    ),
    Fault(
        name="lse-grouped-stale-maximum",
        about=(
            "with grouped heads and one key in the last block, the LSE takes the maximum of the"
            " blocks before"
        ),
        source="xformers 41646dbb",
        file=TRITON_FORWARD,
        edits=(
            ("            m = m_new\n", "            stale = m\n            m = m_new\n"),
            (
                "m = tl.full([BLOCK_M]",
                'stale = tl.full([BLOCK_M], float("-inf"), tl.float32)\n    m = tl.full([BLOCK_M]',
            ),
            (
                "(m + tl.log2(denominator))",
                (
                    "(tl.where((group > 1) & (seqlen_kv % BLOCK_N == 1), stale, m) +"
                    " tl.log2(denominator))"
                ),
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="lse-of-half-precision-sum",
        about="the sum under the LSE's logarithm is rounded to fp16",
        source="none known",
        file=TRITON_FORWARD,
        edits=((_LSE, _LSE.replace("denominator", "denominator.to(tl.float16).to(tl.float32)")),),
        common=SQUARE,
    ),
    Fault(
        name="lse-epsilon",
        about="an epsilon of 1e-6 is added under the LSE's logarithm",
        source="none known",
        file=TRITON_FORWARD,
        edits=((_LSE, _LSE.replace("denominator", "denominator + 1e-6")),),
        common=SQUARE,
    ),
    Fault(
        name="division-epsilon",
        about="an epsilon of 1e-6 is added to the denominator",
        source="none known",
        file=TRITON_FORWARD,
        edits=((_DIVISION, "o_tile = acc / (denominator[:, None] + 1e-6)"),),
        common=SQUARE,
    ),
    Fault(
        name="division-by-half-precision",
        about="the reciprocal of the denominator is rounded to fp16",
        source="none known",
        file=TRITON_FORWARD,
        edits=(
            (
                _DIVISION,
                "o_tile = acc * (1.0 / denominator).to(tl.float16).to(tl.float32)[:, None]",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="output-rounded-twice",
        about="O is rounded to bf16 before it is rounded to its own dtype",
        source="none known",
        file=TRITON_FORWARD,
        edits=(
            ("o_tile.to(out.dtype.element_ty)", "o_tile.to(tl.bfloat16).to(out.dtype.element_ty)"),
        ),
        common=SQUARE,
    ),
    Fault(
        name="accumulator-not-rescaled",
        about="a new maximum does not rescale the accumulator",
        source="none known",
        file=TRITON_FORWARD,
        edits=(("            acc = acc * alpha[:, None]\n", ""),),
        common=ONE_BLOCK,
    ),
    Fault(
        name="sum-not-rescaled",
        about="a new maximum does not rescale the row sum",
        source="none known",
        file=TRITON_FORWARD,
        edits=((_SUM, "l = l + tl.sum(p, 1)"),),
        common=ONE_BLOCK,
    ),
    Fault(
        name="sum-in-fp16",
        about="the running sum is kept in fp16",
        source="SageAttention #93",
        file=TRITON_FORWARD,
        edits=((_SUM, "l = (l * alpha + tl.sum(p, 1)).to(tl.float16).to(tl.float32)"),),
        common=SQUARE,
    ),
    Fault(
        name="accumulator-in-fp16",
        about="the accumulator of P V is kept in fp16",
        source="SageAttention #93",
        file=TRITON_FORWARD,
        edits=((_PRODUCT, f"{_PRODUCT}.to(tl.float16).to(tl.float32)"),),
        common=SQUARE,
    ),
    Fault(
        name="scores-in-fp16",
        about="Q K^T accumulates in fp16, though fp32 is declared",
        source="SageAttention #93",
        file=TRITON_FORWARD,
        edits=(
            (
                _SCORES,
                _SCORES.replace(" * scale_log2", ".to(tl.float16).to(tl.float32) * scale_log2"),
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="probability-in-bf16",
        about="P is rounded to bf16 before it is rounded to the inputs' dtype",
        source="flash-attention PR #2721",
        file=TRITON_FORWARD,
        edits=((_PRODUCT, _PRODUCT.replace("p.to(v", "p.to(tl.bfloat16).to(v")),),
        common=SQUARE,
    ),
    Fault(
        name="probability-in-e5m2",
        about="P is rounded to e5m2, two bits of fraction",
        source="flash-attention 2409214a",
        file=TRITON_FORWARD,
        edits=((_PRODUCT, _PRODUCT.replace("p.to(v", "p.to(tl.float8e5).to(v")),),
        common="sq=64,skv=1024,d=64,dtype=float16",
    ),
    Fault(
        name="probability-truncated",
        about="P is truncated, not rounded, to 16 bits: a bias against the row sum",
        source="flash-attention PR #2721",
        file=TRITON_FORWARD,
        edits=(
            (
                _PRODUCT,
                'rounding: tl.constexpr = None if v_tile.dtype == tl.float32 else "rtz"\n       '
                "     "
                + _PRODUCT.replace(
                    "p.to(v_tile.dtype)", "p.to(v_tile.dtype, fp_downcast_rounding=rounding)"
                ),
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="probability-flushed",
        about="probabilities below the least normal fp16 number are flushed to 0",
        source="none known",
        file=TRITON_FORWARD,
        edits=(
            (
                _PROBABILITY,
                f"{_PROBABILITY}\n            p = tl.where(p < 6.103515625e-05, 0.0, p)",
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="exp-by-polynomial",
        about="2^x is a polynomial of degree 3, relative error 9e-5, though ex2.approx is declared",
        source="flash-attention c2006099",
        file=TRITON_FORWARD,
        edits=((_PROBABILITY, _POLYNOMIAL),),
        common=SQUARE,
    ),
    Fault(
        name="exp-by-block",
        about=(
            "blocks at an edge take that polynomial, those inside ex2.approx, so that a row's bits"
            " depend on its tile"
        ),
        source="flash-attention c2006099",
        file=TRITON_FORWARD,
        edits=(
            (
                _PROBABILITY,
                f"{_PROBABILITY}\n            if EDGE == 1:\n                "
                + _POLYNOMIAL.replace("\n", "\n    "),
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="scores-clamped",
        about="scores are clamped to [-1000, 1000]",
        source="none known",
        file=TRITON_FORWARD,
        edits=(
            (_SCORES, f"{_SCORES}\n            x = tl.minimum(tl.maximum(x, -1000.0), 1000.0)"),
        ),
        common=SQUARE,
    ),
    Fault(
        name="scale-in-input-dtype",
        about="Q is multiplied by the scale, and rounded, before the product",
        source="triton tutorial 06 (its backward forms k * scale / ln 2 in 16 bits)",
        file=TRITON_FORWARD,
        edits=(
            (
                _SCORES,
                (
                    "x = tl.dot((q_tile * scale_log2).to(q_tile.dtype), tl.trans(k_tile),"
                    ' input_precision="ieee")'
                ),
            ),
        ),
        common=SQUARE,
    ),
    Fault(
        name="scores-in-tf32",
        about="Q K^T of fp32 inputs is multiplied in tf32, though IEEE is declared",
        source="none known",
        file=TRITON_FORWARD,
        edits=((_SCORES, _SCORES.replace("ieee", "tf32")),),
        common=SINGLE,
    ),
    Fault(
        name="values-in-tf32",
        about="P V of fp32 inputs is multiplied in tf32, though IEEE is declared",
        source="none known",
        file=TRITON_FORWARD,
        edits=((_PRODUCT, _PRODUCT.replace("ieee", "tf32")),),
        common=SINGLE,
    ),
    Fault(
        name="maximum-of-unscaled-scores",
        about=(
            "the maximum is taken before the scale is applied, so that a scale of 0 or less makes"
            " NaN or infinity"
        ),
        source="FlashAttention-2 as torch 2.11 carries it",
        file=TRITON_FORWARD,
        edits=(
            (_SCORES, _SCORES.replace(" * scale_log2", "")),
            (_PROBABILITY, "p = tl.exp2((x - shift[:, None]) * scale_log2)"),
            ("alpha = tl.exp2(m - shift)", "alpha = tl.exp2((m - shift) * scale_log2)"),
            (_LSE, _LSE.replace("(m +", "(m * scale_log2 +")),
        ),
        common=SQUARE,
    ),
)
