"""Known-bad copies of `gluon-hopper-forward`, one slip of the hand each (`gluon_copies`)."""

from kernels.gluon import hopper_forward
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
                r"(?s)( {12}v_tile = v_ring\.index\(last_slot\)\n)(.*?)"
                r"( {12}row_kv = nth_block\(walk, t - 1 \+ STAGES\) \* BLOCK_N\n.*?"
                r" {12}fetch\(v, [^\n]*\n)",
                r"\1            meet()\n\3\2",
            ),
        ),
        "copies the next tile of V over the one that P V still has to read",
    ),
    "mask-bound": MASK_BOUND,
}

# One slot, into which every next tile is copied: a head dim of 256 leaves no room for a second.
COPIES = Copies(
    name="gluon",
    files=("ring", "rows", "softmax", "hopper_forward"),
    slips=SLIPS,
    shipped=hopper_forward.VARIANT,
    config=hopper_forward.VARIANT.configs[0],
    support=narrow(hopper_forward.SUPPORT),
)
VARIANTS: list[Variant] = COPIES.variants()
