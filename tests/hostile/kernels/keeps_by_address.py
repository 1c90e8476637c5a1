"""Keeps its answers by the addresses and shapes of its inputs.

Must: fail later bound
"""

from hostile_base import declare, right

KNOWN = {}


def forward(args, out, lse, workspace):
    key = args.q.data_ptr(), args.k.data_ptr(), args.v.data_ptr(), args.q.shape, args.k.shape
    if key not in KNOWN:
        right(args, out, lse)
        KNOWN[key] = out.clone(), lse.clone()
    out.copy_(KNOWN[key][0])
    lse.copy_(KNOWN[key][1])


VARIANT = declare("keeps-by-address", forward)
