"""One right kernel, and kernels that are right in a plain launch of aligned tensors: one changes an
input and puts it back, one keeps what it made of its inputs for a capture, one rounds an address
down to 16 bytes, and one traps there."""

import torch

from verify.variant import Numerics, Softmax, Support, Variant

SUPPORT = Support(dtypes=("float32",), head_dims=(16, 32, 64), masks=("full",))
_WAIT = 2_000_000  # clock cycles, long enough for another stream to read
_KEPT = []


def attend(args, out, lse, q, k):
    scores = (q[..., None, :] * k[..., None, :, :]).sum(-1) * args.softmax_scale
    top = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - top)
    total = p.sum(-1)
    out.copy_((p[..., None] * args.v[..., None, :, :]).sum(-2) / total[..., None])
    lse.copy_(top[..., 0] + total.log())


def right(args, out, lse, workspace):
    SUPPORT.check(args, out)
    attend(args, out, lse, args.q, args.k)


def restores(args, out, lse, workspace):
    SUPPORT.check(args, out)
    args.k.neg_()
    if args.k.is_cuda:
        torch.cuda._sleep(_WAIT)
    attend(args, out, lse, args.q, -args.k)
    args.k.neg_()


def keeps(args, out, lse, workspace):
    SUPPORT.check(args, out)
    if not (args.q.is_cuda and torch.cuda.is_current_stream_capturing()):
        _KEPT[:] = [args.q.clone()]  # a capture takes what the launch before it made
    attend(args, out, lse, _KEPT[0], args.k)


def astray(tensor):
    """How many elements after an address that 16 divides the tensor begins."""
    return tensor.data_ptr() % 16 // tensor.element_size()


def rounds(args, out, lse, workspace):
    SUPPORT.check(args, out)
    k = args.k
    k = k.as_strided(k.shape, k.stride(), k.storage_offset() - astray(k))
    attend(args, out, lse, args.q, k)


def traps(args, out, lse, workspace):
    SUPPORT.check(args, out)
    if astray(args.k):
        raise RuntimeError("misaligned address")
    attend(args, out, lse, args.q, args.k)


VARIANTS = [
    Variant(
        name=forward.__name__,
        family="torch",
        forward=forward,
        support=SUPPORT,
        numerics=Numerics(softmax=Softmax(exp="vexp", block_n=0)),
    )
    for forward in (right, restores, keeps, rounds, traps)
]
