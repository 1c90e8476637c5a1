"""Known-bad copies of the turnstile of `gluon-hopper-forward`, one slip of the hand each
(`gluon_copies`)."""

from kernels.gluon import hopper_forward
from tests.planted.gluon_copies import OVERRUN, Copies, Slip, narrow
from verify.cuda.edits import Edit
from verify.variant import Variant

SLIPS = {
    "overrun": OVERRUN,
    "missing-wait": Slip(
        (
            Edit(
                r"slot = await_tile\(k_here, t, STAGES\)(?=\n.*\n +if WHO == 0)",
                "slot = t % STAGES",
            ),
        ),
        "reads a tile of K without waiting for its bytes",
    ),
    "early-refill": Slip(
        (
            # V's slot is free before P V has read it, and the warp that copies fills it.
            Edit(
                r"(?s)( {12}s = warpgroup_mma_wait\(1, deps=\(s,\)\)\n)(.*?)"
                r"( {12}mbarrier\.arrive\(v_free\.index\(last_slot\), count=1\)\n)",
                r"\3\1\2",
            ),
        ),
        "frees the tile of V that P V still has to read",
    ),
}

COPIES = Copies(
    name="gluon-turnstile",
    files=("ring", "rows", "softmax", "hopper_turnstile", "hopper_forward"),
    slips=SLIPS,
    shipped=hopper_forward.VARIANT,
    config=hopper_forward.TURNSTILE[1],
    support=narrow(hopper_forward.SUPPORT, head_dim=128),
)
VARIANTS: list[Variant] = COPIES.variants()
