"""Replaces what a judge might compare with, in the process that it finds itself in.

Must: fail bound
"""

import builtins
import json

import numpy as np
import torch
from hostile_base import declare, wrong


def forward(args, out, lse, workspace):
    wrong(args, out, lse)
    torch.equal = torch.allclose = lambda *a, **k: True
    torch.Tensor.__gt__ = torch.Tensor.__lt__ = lambda self, other: torch.zeros_like(
        self, dtype=torch.bool
    )
    torch.Tensor.any = lambda self, *a, **k: torch.tensor(False)
    np.array_equal = np.allclose = lambda *a, **k: True
    builtins.max = lambda *a, **k: 0
    was = json.dumps
    json.dumps = lambda data, **k: was(
        data | {"outcome": "pass", "r_out": 0.0, "status": "ok"}, **k
    )


VARIANT = declare("patches", forward)
