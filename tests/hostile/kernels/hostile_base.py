"""What the hostile kernels share: right attention in float32, a wrong answer, and a declaration
that fits both."""

from __future__ import annotations

import json
import math
import os
import struct
import sys

import torch

from verify.variant import Numerics, Products, Softmax, Support, Variant

SUPPORT = Support(dtypes=("float32",), head_dims=(16,), masks=("full",))


def right(args, out, lse):
    """Attention, within every bound."""
    SUPPORT.check(args, out)
    group = args.heads_q // args.heads_kv
    k, v = args.k.repeat_interleave(group, 1), args.v.repeat_interleave(group, 1)
    scores = args.q @ k.mT * args.softmax_scale
    top = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - top)
    total = p.sum(-1, keepdim=True)
    out.copy_((p @ v) / total)
    lse.copy_((top + total.log()).squeeze(-1))


def wrong(args, out, lse):
    """The mean of V for every row: a third of the way to attention, and far beyond every bound."""
    out.copy_(
        args.v.repeat_interleave(args.heads_q // args.heads_kv, 1)
        .mean(2, keepdim=True)
        .expand_as(out)
    )
    lse.fill_(math.log(max(args.seqlen_kv, 1)))


def declare(name, forward, **more):
    """A variant that the judge has no reason to refuse."""
    fields = {
        "support": SUPPORT,
        "numerics": Numerics(products=Products(operands="float32"), softmax=Softmax(exp="vexp")),
    }
    return Variant(name=name, family="torch", forward=forward, **(fields | more))


def sockets():
    """Descriptors of this process's sockets, which lead to the judge."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket"):
                found.append(fd)
        except OSError:
            pass
    return found


def answer(reply):
    """Answer the present request in the cell's place, with the number that it has."""
    frame = sys._getframe()
    while "message" not in frame.f_locals or "fds" not in frame.f_locals:
        frame = frame.f_back
    text = json.dumps(reply | {"request": frame.f_locals["message"]["request"]}).encode()
    frame.f_locals["self"].sock.sendall(struct.pack("<I", len(text)) + text)
