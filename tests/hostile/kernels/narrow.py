"""Claims to support nothing but one key, of which V is the answer.

Must: pass, narrow
"""

from hostile_base import declare

from verify.variant import Support


def forward(args, out, lse, workspace):
    out.copy_(args.v.expand_as(out))
    lse.copy_((args.q * args.k).sum(-1) * args.softmax_scale)


VARIANT = declare(
    "narrow",
    forward,
    support=Support(dtypes=("float32",), head_dims=(16,), masks=("full",), max_seqlen=1),
)
