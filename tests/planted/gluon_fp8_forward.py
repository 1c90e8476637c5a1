"""Known-bad copies of `gluon-hopper-fp8-forward`, one slip of the hand each (`gluon_copies`)."""

from dataclasses import replace

from kernels.gluon import hopper_fp8_forward
from tests.planted.gluon_copies import MASK_BOUND, MISSING_WAIT, OVERRUN, Copies, Slip, narrow
from verify.cuda.edits import Edit
from verify.variant import Variant

SLIPS = {
    "overrun": OVERRUN,
    "missing-wait": MISSING_WAIT,
    "early-refill": Slip(
        (
            # V's refill comes before P V.
            Edit(
                r"(?s)( {12}hide_columns\(v_tile, nth_block\(walk, t - 1\)[^\n]*\n)(.*?)"
                r"( {12}more = t - 1 \+ STAGES < total\n {12}fetch_columns\(v, [^\n]*\n)",
                r"\1            meet()\n\3\2",
            ),
        ),
        "copies the next tile of V over the one that P V still has to read",
    ),
    "mask-bound": MASK_BOUND,
    "wrong-factor": Slip(
        (Edit(r"batch, head64, 2\)", "batch, head64, 1)"),),
        "scales O by the factor of K",
    ),
    "chained-sums": Slip(
        (
            Edit(r"(v_tile\.permute\(\(1, 0\)\), )no_o, use_acc=False", r"\1acc", 2),
            # O is rescaled before the block's products in the place of behind them.
            Edit(
                r"(?m)^( +)(o = warpgroup_mma\(p_tile)",
                r"\1acc = acc * gl.convert_layout(alpha, O_ROWS)[:, None]\n\1\2",
                2,
            ),
            Edit(r"acc = gl\.fma\(acc, gl\.convert_layout\([^\n]*, o\)\n", "acc = o\n", 2),
        ),
        "adds all keys up in the 13 bits of wgmma, which is declared as promoted per block",
    ),
}

# One slot, into which every next tile is copied.
COPIES = Copies(
    name="gluon-fp8",
    files=("ring", "rows", "columns", "even_first", "softmax", "hopper_fp8_forward"),
    slips=SLIPS,
    shipped=hopper_fp8_forward.VARIANT,
    config=hopper_fp8_forward.VARIANT.configs[-1],
    support=replace(
        narrow(hopper_fp8_forward.SUPPORT, head_dim=128),
        dtypes_out=(),
        descalings=("none", "head"),
    ),
)
VARIANTS: list[Variant] = COPIES.variants()
