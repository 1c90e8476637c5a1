"""A file whose variants fail in one of the several launches of a case, and an honest one.

A launch is told from the others by its V, which is all powers of two where an oracle has taken V
apart, or by the number of calls of its process.
"""

import os
import time
from pathlib import Path

import torch

from verify.variant import Numerics, Output, Products, Softmax, Support, Variant

SUPPORT = Support(dtypes=("float32",), head_dims=(16,), masks=("full",), cross_lengths=True)
MARK = Path("/dev/shm") / f"verify-test-{os.getppid()}"  # one for each fork server
CALLS = []
KEPT = {}


def right(args, out, lse, workspace):
    SUPPORT.check(args, out)
    s = args.q @ args.k.mT * args.softmax_scale
    out.copy_(torch.softmax(s, -1) @ args.v)
    lse.copy_(torch.logsumexp(s, -1))


def on_powers_of_two(fault):
    def forward(args, out, lse, workspace):
        right(args, out, lse, workspace)
        if bool((torch.frexp(args.v)[0].abs() == 0.5).all()):
            fault(out)

    return forward


def aborts(out):
    os.abort()


def raises(out):
    raise RuntimeError("no room for the parts")


def hangs(out):
    while True:
        time.sleep(0.01)


def writes_past_the_end(out):
    out.as_strided((1,), (1,), out.storage_offset() + out.numel() + 8).fill_(1.0)


def writes_before_the_arena(out):
    """Below the first buffer, at the very begin of the memory."""
    out.as_strided((1,), (1,), 0).fill_(1.0)


def second_call_aborts(args, out, lse, workspace):
    right(args, out, lse, workspace)
    CALLS.append(1)
    if len(CALLS) == 2:
        os.abort()


def aborts_once(args, out, lse, workspace):
    right(args, out, lse, workspace)
    CALLS.append(1)
    if len(CALLS) == 2 and not MARK.exists():
        MARK.touch()
        os.abort()


def keeps_k_by_its_pointer(args, out, lse, workspace):
    k = KEPT.setdefault((args.k.data_ptr(), args.k.shape), args.k.clone())
    s = args.q @ k.mT * args.softmax_scale
    out.copy_(torch.softmax(s, -1) @ args.v)
    lse.copy_(torch.logsumexp(s, -1))


def keeps_its_output(args, out, lse, workspace):
    """Writes only where its last output's shape is not this one's."""
    if KEPT.get("shape") != out.shape:
        right(args, out, lse, workspace)
        KEPT["shape"] = out.shape


def variant(name, forward):
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
    )


VARIANTS = [
    variant("honest", right),
    variant("aborts", on_powers_of_two(aborts)),
    variant("raises", on_powers_of_two(raises)),
    variant("hangs", on_powers_of_two(hangs)),
    variant("writes-past-the-end", on_powers_of_two(writes_past_the_end)),
    variant("writes-before-the-arena", on_powers_of_two(writes_before_the_arena)),
    variant("second-call-aborts", second_call_aborts),
    variant("aborts-once", aborts_once),
    variant("keeps-k", keeps_k_by_its_pointer),
    variant("keeps-its-output", keeps_its_output),
]
