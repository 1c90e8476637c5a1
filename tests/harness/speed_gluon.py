"""Edits of the Gluon forward of 8-bit inputs that were tried for speed, or are to be.
`speed_rounds` times them.

They are about instructions: of some 750 that a warp issues for a block of 64 rows and 128 keys at
head dim 128, 128 multiply by the scale and by 256, and 128 rescale O and add that of the block.
"""

from __future__ import annotations

from kernels.gluon import hopper_fp8_forward
from tests.planted.gluon_copies import Copies, Slip
from verify.cuda.edits import Edit

_RESCALED = "gl.convert_layout(alpha, O_ROWS)[:, None]"
# O is rescaled where that of the block is added: one instruction for an element, and one rounding.
OUT_BY_FMA = (
    Edit(r"(?m)^ +acc = acc \* gl\.convert_layout\(alpha, O_ROWS\)\[:, None\]\n", "", times=2),
    Edit(r"acc = acc \+ o\b", f"acc = gl.fma(acc, {_RESCALED}, o)"),
    Edit(
        r"acc = acc \+ (warpgroup_mma_wait\(0, deps=\(o,\)\))",
        rf"acc = gl.fma(acc, {_RESCALED}, \1)",
    ),
)
# The factor 256 of P is 8 in its exponents.
FACTOR_IN_EXPONENT = (
    Edit(r"gl\.exp2\(x - shift\[:, None\]\)", "gl.exp2(x - (shift - 8.0)[:, None])", times=2),
    Edit(r"\(p \* 256\.0\)\.to", "p.to", times=2),
    Edit(r"= store_lse\(lse, m, l,", "= store_lse(lse, m, l * 0.00390625,"),
)
# A score and its exponent are one instruction; the scale is positive.
EXPONENT_BY_FMA = (
    Edit(r"import lifted, scores", "import lifted_signed, masked"),
    Edit(r"= scores\(s, factor, walk,", "= masked(s, walk,", times=2),
    Edit(r"(\n +)(m = gl\.full[^\n]*)", r"\1\2\1top = m"),
    Edit(
        r"m, shift, alpha = lifted\(x, m\)",
        "top, m, shift, alpha = lifted_signed(x, top, m, factor)",
        2,
    ),
    Edit(
        r"gl\.exp2\(x - (.*)\[:, None\]\)", r"gl.exp2(gl.fma(x, factor, -(\1)[:, None]))", times=2
    ),
)

EDITS: dict[str, tuple[Edit, ...]] = {
    "out-by-fma": OUT_BY_FMA,
    "factor-in-exponent": FACTOR_IN_EXPONENT,
    "exponent-by-fma": EXPONENT_BY_FMA,
    "out-by-fma-and-factor": (*OUT_BY_FMA, *FACTOR_IN_EXPONENT),
    "all-three": (*OUT_BY_FMA, *FACTOR_IN_EXPONENT, *EXPONENT_BY_FMA),
}

COPIES = Copies(
    name="speed",
    files=("ring", "rows", "softmax", "columns", "hopper_fp8_forward"),
    slips={label: Slip(edits, label) for label, edits in EDITS.items()},
    shipped=hopper_fp8_forward.VARIANT,
    config=hopper_fp8_forward.VARIANT.configs[-1],
    support=hopper_fp8_forward.SUPPORT,
)
