"""Writes over the whole arena: its inputs, the redzones, and whatever the judge may have left
there.

Must: fail memory
"""

import ctypes

from hostile_base import declare, right


def forward(args, out, lse, workspace):
    right(args, out, lse)
    start = min(args.q.data_ptr(), args.k.data_ptr(), args.v.data_ptr(), out.data_ptr()) - 4096
    ctypes.memset(start, 0, 3 * 4096)


VARIANT = declare("scribbles", forward)
