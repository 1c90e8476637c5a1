"""Known-bad copies of `gluon-hopper-fp8-forward`, one slip of the hand each (`gluon_copies`)."""

from kernels.gluon import hopper_fp8_forward
from tests.planted.gluon_copies import MISSING_WAIT, OVERRUN, Copies, Slip, narrow
from verify.cuda.edits import Edit
from verify.variant import Variant

SLIPS = {
    "overrun": OVERRUN,
    "missing-wait": MISSING_WAIT,
    "early-refill": Slip(
        (
            # V's refill comes before P V.
            Edit(
                r"(?s)( {12}v_tile = v_ring\.index\(last_slot\)\n)(.*?)"
                r"( {12}key = nth_block\(walk, t - 1 \+ STAGES\) \* BLOCK_N\n.*?"
                r" {12}fetch_columns\(v, [^\n]*\n)",
                r"\1            meet()\n\3\2",
            ),
        ),
        "copies the next tile of V over the one that P V still has to read",
    ),
}

# One slot, into which every next tile is copied.
COPIES = Copies(
    name="gluon-fp8",
    files=("ring", "rows", "columns", "softmax", "hopper_fp8_forward"),
    slips=SLIPS,
    shipped=hopper_fp8_forward.VARIANT,
    config=hopper_fp8_forward.VARIANT.configs[-1],
    support=narrow(hopper_fp8_forward.SUPPORT, head_dim=128),
)
VARIANTS: list[Variant] = COPIES.variants()
