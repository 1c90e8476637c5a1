"""Right in the config that every run judges, and in one of two further ones; the other one drops
the last key."""

import torch

from verify.variant import Config, Contract, Numerics, Products, Softmax, Support, Variant

SUPPORT = Support(
    dtypes=("float32",), head_dims=(16,), masks=("full",), devices=("cpu", "cuda"), min_seqlen=2
)


def forward(args, out, lse, workspace):
    SUPPORT.check(args, out)
    keys = args.seqlen_kv - (args.config.block_n == 64)
    scores = args.q @ args.k[:, :, :keys].mT * args.softmax_scale
    out.copy_(torch.softmax(scores, -1) @ args.v[:, :, :keys])


VARIANT = Variant(
    name="wrong-further",
    family="torch",
    forward=forward,
    configs=[Config(block_n=16)],
    further_configs=lambda: [Config(block_n=n) for n in (16, 32, 64)],
    support=SUPPORT,
    numerics=Numerics(products=Products(operands="float32"), softmax=Softmax(exp="vexp")),
    contract=Contract(lse=None),
)
