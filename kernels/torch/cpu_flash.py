"""torch's blocked attention on the CPU, `aten::_scaled_dot_product_flash_attention_for_cpu`, with
its log-sum-exp.

Two dtype classes, because the exponentials differ, and two ways to say "causal", because only one
of them is right for every scale.  Read off the operator's results (torch 2.13, x86 with AVX-512,
MKL) and ATen/cpu/vec/vec512/vec512_float.h:
- Keys come in blocks of 512, queries in blocks of 32 (seqlen_q < 192), 64 (< 768) or 256.
- Products accumulate in fp32 and stay fp32, also for fp16 and bf16: a score of 114.125 comes back
  unrounded as an LSE, and +A and -A in different key blocks of V cancel exactly.  fp16 and bf16
  round un-normalised P to the input's dtype before PV; the row sum is of unrounded P.  (Without
  MKL's or oneDNN's mixed-precision products ATen would round each to the input.)
- fp32: `exp_u20`.  5.5 ulp at most, relative error 3.9e-7 = 2^-21.3, over 4,000,000 arguments in
  each of five intervals of [-86.9, 0], by an emulation that equals the operator bitwise on 400,000
  of them; 0 below -86.99 = -125.5 ln 2.
- fp16, bf16: `fexp_u20`, a cubic in place of the mantissa.  985 ulp at most, relative error
  1.125e-4 = 2^-13.1, and fexp_u20(0) = 0.99995; 0 below -87.34.  Through the operator, by LSEs on
  [-2, -0.5]: -1.10e-4 to +1.00e-4.
- Keys past the last full vector, and the factor of a rescale, take the C library's exp.
- An empty row gives O = 0 and LSE = 0, not -inf.  A row whose scores are *all* NaN does so too if
  seqlen_kv is less than a vector (16), because the maximum drops NaN there.
- A score of +inf gives O = 0 in fp16 and bf16 (LSE = +inf), NaN in fp32.
- `is_causal` writes -inf into scores before they are scaled: a scale of zero makes NaN of the
  masked half, a negative one +inf.  The public scaled_dot_product_attention does the same.  So the
  "-causal" variants take the default scale only; the others hand every mask over as a bias, which
  is added after the scale.
- seqlen_q = 0 and seqlen_kv = 0 kill the process (integer division by zero); the front end sends
  them elsewhere.
- With more than one thread, a single-head problem may differ in the last bit from the same head
  within a batch (MKL).
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.torch.common import BIAS_MASKS, flag_or_bias, missing_operator
from verify.variant import AttentionArgs, Contract, Numerics, Softmax, Support, Variant, Workspace

BIAS_SUPPORT = Support(
    dtypes=("float32",),
    head_dims=range(1, 513),
    masks=BIAS_MASKS,
    intersections=True,
    grouped_heads=True,
    devices=("cpu",),
)
FLAG_SUPPORT = replace(
    BIAS_SUPPORT,
    masks=("full", "causal.tl", "causal.square"),
    intersections=False,
    scales="positive",
)
# Dtypes and the exponential that they get.
DTYPE_CLASSES = {
    "float32": (("float32",), "exp_u20"),
    "16bit": (("float16", "bfloat16"), "fexp_u20"),
}


def _variant(suffix: str, support: Support, exp: str) -> Variant:
    def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
        """O and natural LSE; raises `Unsupported`."""
        support.check(args, out)
        assert lse is not None
        causal, bias = flag_or_bias(args, flag=not support.intersections)
        found_out, found_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            args.q, args.k, args.v, 0.0, causal, attn_mask=bias, scale=args.softmax_scale
        )
        out.copy_(found_out)
        lse.copy_(found_lse)

    return Variant(
        name=f"torch-cpu-flash-{suffix}",
        family="torch",
        forward=forward,
        support=support,
        numerics=Numerics(softmax=Softmax(exp=exp, block_n=512)),
        contract=Contract(empty_row_lse=0.0, batch_invariant=False),
        allocates_outputs=True,
        available=lambda: missing_operator("_scaled_dot_product_flash_attention_for_cpu"),
    )


VARIANTS = [
    _variant(name + suffix, replace(support, dtypes=dtypes), exp)
    for suffix, support in {"": BIAS_SUPPORT, "-causal": FLAG_SUPPORT}.items()
    for name, (dtypes, exp) in DTYPE_CLASSES.items()
]

WITNESS = (
    {
        "case": (
            "torch-cpu-flash-float32:default:accuracy:b=3,hq=8,sq=17,skv=17,d=33,dtype=float32,"
            "mask=causal,lq=sbhd.p4.o8,lk=bhsd.p16.o8.xbh,lv=bhsd.p16.o8.xbh,lo=sbhd.p1.o8,"
            "ldo=sbhd.o1,dist=v_mean,seed=6442138"
        ),
        "tensor": "out",
        "r": 0.232,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "torch-cpu-flash-16bit:default:accuracy:hq=6,hkv=2,sq=207,skv=166,d=128,"
            "dtype=bfloat16,mask=prefix.171,lq=bshd,lk=bshd,lv=bshd,lo=bshd,ldo=bshd,"
            "dist=one_hot_v,seed=4294967294"
        ),
        "tensor": "out",
        "r": 0.896,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "torch-cpu-flash-float32-causal:default:accuracy:b=2,hq=2,hkv=2,sq=65,skv=65,d=256,"
            "dtype=float32,mask=causal,lq=bshd,lk=bshd,lv=bshd,lo=bshd,ldo=bshd,dist=low_rank,"
            "seed=702"
        ),
        "tensor": "out",
        "r": 0.151,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "torch-cpu-flash-16bit-causal:default:accuracy:hq=6,hkv=2,sq=81,skv=81,d=200,"
            "dtype=bfloat16,dist=one_hot_v,seed=3584"
        ),
        "tensor": "out",
        "r": 0.903,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
)
