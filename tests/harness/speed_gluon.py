"""Edits of the Gluon forward of 8-bit inputs that were tried for speed.  `speed_rounds` times them.

Each undoes one of the steps by which it became 1.3 times the 16-bit forward at head dim 128.
"""

from __future__ import annotations

from kernels.gluon import hopper_fp8_forward
from tests.planted.gluon_copies import Copies, Slip
from verify.cuda.edits import Edit

# Lanes exchange P, as of an odd number of keys.
EXCHANGE = (Edit(r"even = args\.seqlen_kv % 2 == 0", "even = False"),)
# P is multiplied by 256 behind its exponential.
FACTOR_APART = (
    Edit(r"\(8\.0 - shift\)\[:, None\]", "-shift[:, None]", times=2),
    Edit(r"left_operand\(p, DTYPE, P", "left_operand(p * 256.0, DTYPE, P", times=2),
    Edit(r"l \* 0\.00390625", "l"),
)
# O is rescaled, and that of the block added: two instructions for an element.
OUT_IN_TWO = (
    Edit(r"acc = gl\.fma\(acc, (gl\.convert_layout\([^\n]*), o\)", r"acc = acc * \1 + o", times=2),
)
# The maxima of the next block wait for O of this one, too.
MAXIMA_LATER = (
    Edit(r"s = warpgroup_mma_wait\(1, deps=\(s,\)\)", "s, o = warpgroup_mma_wait(0, deps=(s, o))"),
    Edit(r"(?m)^ {12}o = warpgroup_mma_wait\(0, deps=\(o,\)\)\n( +meet)", r"\1"),
)

EDITS: dict[str, tuple[Edit, ...]] = {
    "exchange": EXCHANGE,
    "factor-apart": FACTOR_APART,
    "out-in-two": OUT_IN_TWO,
    "maxima-later": MAXIMA_LATER,
}

COPIES = Copies(
    name="speed",
    files=("ring", "rows", "softmax", "columns", "even_first", "hopper_fp8_forward"),
    slips={label: Slip(edits, label) for label, edits in EDITS.items()},
    shipped=hopper_fp8_forward.VARIANT,
    config=hopper_fp8_forward.VARIANT.configs[-1],
    support=hopper_fp8_forward.SUPPORT,
)
