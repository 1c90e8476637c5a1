"""Is right, and keeps 80 MiB of every call.

Must: pass, growing
"""

import torch
from hostile_base import declare, right

KEPT = []


def forward(args, out, lse, workspace):
    KEPT.append(torch.ones(80 << 20, dtype=torch.uint8))
    right(args, out, lse)


VARIANT = declare("leaks", forward)
