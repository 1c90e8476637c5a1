"""Looks for the truth, and for the judge's thresholds, in every frame and every object that is
alive, and makes them agree.

Must: fail bound
"""

import gc
import sys

import torch
from hostile_base import declare, wrong


def forward(args, out, lse, workspace):
    wrong(args, out, lse)
    frame = sys._getframe()
    while frame is not None:
        for name, value in list(frame.f_locals.items()):
            if (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.shape == out.shape
                and name != "out"
            ):
                value.copy_(out)
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "out_bound" in thing:
            thing["out_bound"] = float("inf")


VARIANT = declare("frames", forward)
