"""One Triton kernel whose products of fp32 are tf32, as `tl.dot` makes them unless told otherwise:
declared so, and declared ieee, which is wrong."""

from dataclasses import replace

import triton
import triton.language as tl

from verify.variant import Config, Contract, Numerics, Products, Softmax, Support, Variant

SUPPORT = Support(dtypes=("float32",), head_dims=(16, 32), masks=("full",), layouts="contiguous")


@triton.jit
def attend(  # noqa: PLR0917 - a launch has no dataclasses
    q, k, v, out, lse, scale, keys, rows, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr
):
    head = tl.program_id(0)
    row, key, dim = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, DIM)
    own = head * rows * DIM + row[:, None] * DIM + dim[None]
    other = head * keys * DIM + key[:, None] * DIM + dim[None]
    a = tl.load(q + own, mask=row[:, None] < rows, other=0.0)
    b = tl.load(k + other, mask=key[:, None] < keys, other=0.0)
    scores = tl.dot(a, tl.trans(b)) * scale
    scores = tl.where(key[None] < keys, scores, float("-inf"))
    top = tl.max(scores, 1)
    p = tl.exp(scores - top[:, None])
    total = tl.sum(p, 1)
    c = tl.load(v + other, mask=key[:, None] < keys, other=0.0)
    tl.store(out + own, tl.dot(p, c) / total[:, None], mask=row[:, None] < rows)
    tl.store(lse + head * rows + row, top + tl.log(total), mask=row < rows)


def forward(args, out, lse, workspace):
    SUPPORT.check(args, out)
    shape = args.seqlen_kv, args.seqlen_q
    sizes = {
        name: max(16, triton.next_power_of_2(n))
        for name, n in zip(("KEYS", "ROWS"), shape, strict=True)
    }
    attend[(args.batch * args.heads_q,)](
        args.q, args.k, args.v, out, lse, args.softmax_scale, *shape, **sizes, DIM=args.head_dim
    )


BY_TF32 = Variant(
    name="tf32",
    family="triton",
    forward=forward,
    configs=[Config()],
    support=SUPPORT,
    numerics=Numerics(
        products=Products(float32_products="tf32"), softmax=Softmax(exp="expf", block_n=0)
    ),
    contract=Contract(masked_values="finite"),
)
VARIANTS = [
    BY_TF32,
    replace(BY_TF32, name="ieee", numerics=Numerics(softmax=Softmax(exp="expf", block_n=0))),
]
