"""Declares lengths of which the least is more than the most.

Must: not load: seqlen
"""

from hostile_base import declare, wrong

from verify.variant import Support


def forward(args, out, lse, workspace):
    wrong(args, out, lse)


VARIANT = declare(
    "nonsense",
    forward,
    support=Support(dtypes=("float32",), head_dims=(16,), min_seqlen=9, max_seqlen=3),
)
