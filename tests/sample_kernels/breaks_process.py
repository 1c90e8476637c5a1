"""A file that breaks its own process: variants that leave damage behind, and an innocent one that
meets it.

Damage to a heap cannot be planted so that it always shows; what stands for it here is a broken
torch function, which the judge's code in the cell uses too, and a flag by which every later launch
dies, raises, hangs or is wrong.
"""

import os
import time

import torch

from verify.variant import Numerics, Output, Products, Softmax, Support, Variant

SUPPORT = Support(dtypes=("float32",), head_dims=(16,), masks=("full",), cross_lengths=True)
STATE = {"broken": "", "calls": 0}


def no_attribute(*args, **kwargs):
    raise AttributeError("'NoneType' object has no attribute 'shape'")


def right(args, out, lse, workspace):
    SUPPORT.check(args, out)
    if STATE["broken"] == "crash":
        os.abort()
    if STATE["broken"] == "raise":
        raise RuntimeError("double free")
    while STATE["broken"] == "hang":
        time.sleep(0.01)
    s = args.q @ args.k.mT * args.softmax_scale
    out.copy_(torch.softmax(s, -1) @ args.v)
    lse.copy_(torch.logsumexp(s, -1))


def breaks_the_judge(args, out, lse, workspace):
    right(args, out, lse, workspace)
    torch.full_like = no_attribute


def breaks(how):
    def forward(args, out, lse, workspace):
        right(args, out, lse, workspace)
        STATE["broken"] = how

    return forward


def wrong_from_the_third_case_on(args, out, lse, workspace):
    right(args, out, lse, workspace)
    STATE["calls"] += args.seqlen_q == 3  # a length that each of three cases has
    if STATE["calls"] > 2:
        out.mul_(1.25)


def variant(name, forward, **changes):
    return Variant(
        name=name,
        family="torch",
        forward=forward,
        support=SUPPORT,
        numerics=Numerics(
            products=Products(operands="float32"),
            softmax=Softmax(exp="vexp", block_n=0),
            output=Output(normalised=True),
        ),
        **changes,
    )


VARIANTS = [
    variant("innocent", right, allocates_outputs=True),
    variant("breaks-the-judge", breaks_the_judge),
    variant("breaks-by-crash", breaks("crash")),
    variant("breaks-by-raise", breaks("raise")),
    variant("breaks-by-hang", breaks("hang")),
    variant("wrong-later", wrong_from_the_third_case_on),
]
