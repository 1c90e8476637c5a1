"""Known-bad copies of `gluon-hopper-cluster-forward`, one slip each (`gluon_copies`)."""

from kernels.gluon import hopper_cluster_forward
from tests.planted.gluon_copies import MISSING_WAIT, OVERRUN, Copies, Slip, narrow
from verify.cuda.edits import Edit
from verify.variant import Variant

SLIPS = {
    "overrun": OVERRUN,
    "missing-wait": MISSING_WAIT,
    "early-refill": Slip(
        (Edit(r"(?s)( +await_partner\(\)\n)( {12}key = .*?)(\n\n        m, shift)", r"\2\n\1\3"),),
        "copies the next tiles into both CTAs before the partner has read the last ones",
    ),
    "early-exit": Slip(
        (
            Edit(r"await_tile\(v_here, total - 1, STAGES\)", "(total - 1) % STAGES"),
            Edit(r"await_partner\(\)(?=  # neither CTA leaves)", "pass"),
        ),
        "waits neither for the last tile of V, which its partner may have to send, nor for the"
        " partner before it leaves",
    ),
    "other-half": Slip(
        (Edit(r"tile \* ROWS, q_here", "tile * ROWS + ROWS // 2, q_here"),),
        "gives the first CTA the rows of the second",
    ),
}

COPIES = Copies(
    name="gluon-cluster",
    files=("ring", "rows", "cluster", "hopper_cluster_forward"),
    slips=SLIPS,
    shipped=hopper_cluster_forward.VARIANT,
    config=hopper_cluster_forward.VARIANT.configs[0],
    support=narrow(hopper_cluster_forward.SUPPORT),
)
VARIANTS: list[Variant] = COPIES.variants()
