"""The backward of torch's blocked attention on the CPU,
`aten::_scaled_dot_product_flash_attention_for_cpu_backward`.

It starts from what `cpu_flash` saved.  Read off ATen/native/cpu/FlashAttentionKernel.cpp and the
operator's results (torch 2.13, x86 with AVX-512, MKL):
- Queries in blocks of 32 (seqlen_q < 192), 64 (< 768) or 256, keys in blocks of 512; S, dP and
  delta are fp32.
- The products get the scale as alpha.  For S sgemm multiplies K by it at most shapes: scores of 0
  come back as 3e-8, and at a scale of 2^126 keys of 4 overflow.  For dQ and dK it multiplies dS, or
  the other operand: at 2^-126 dS of 1/8 loses three bits.  fp16 has no product of its own, and is
  widened to fp32 for sgemm.  oneDNN's bf16 product multiplies its results on an Intel Xeon; on an
  AMD EPYC (Zen 4) keys overflow as for sgemm, and the declaration is of both.
- P = exp(S - LSE) by the exponential of 1 ulp, not by the forward's faster one.  fp16 and bf16
  round P and dS for the products; dS is made of the P before that.
- Each block's share of dQ, dK and dV is scaled and added to the result as it lies in memory: in
  fp16 and bf16 every 512 keys round dQ, every 32 to 256 rows round dK and dV.
- One head of K per head of Q: with fewer the operator reads and writes past their end.
- A row without a key gives dQ = 0: its LSE is 0, and exp(-inf - 0) too.
- `is_causal`, scales and lengths of 0: as in `cpu_flash`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.torch import cpu_flash
from kernels.torch.common import flag_or_bias, missing_operator
from verify.variant import (
    AttentionArgs,
    Contract,
    GradientNumerics,
    GradientProducts,
    Gradients,
    GradientSoftmax,
    GradientSums,
    Saved,
    Variant,
    Workspace,
)


def _variant(saver: Variant, dtype: str) -> Variant:
    support = replace(saver.support, grouped_heads=False, dtypes=(dtype,))

    def backward(
        args: AttentionArgs, saved: Saved, dout: Tensor, gradients: Gradients, workspace: Workspace
    ) -> None:
        """dQ, dK and dV from O and natural LSE; raises `Unsupported`."""
        support.check_backward(args, saved, dout, gradients)
        causal, bias = flag_or_bias(args, flag=not support.intersections)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(dout, args.q, args.k, args.v, saved.out, saved.lse, 0.0, causal),
            attn_mask=bias,
            scale=args.softmax_scale,
        )
        gradients.copy_(*found)

    wide, widened = dtype == "float32", dtype != "bfloat16"
    return Variant(
        name=saver.name.replace("cpu-flash", "cpu-flash-backward").replace("16bit", dtype),
        family="torch",
        backward=backward,
        saved_by=saver,
        support=support,
        gradients=GradientNumerics(
            products=(
                GradientProducts(operands="float32", prescale="alpha")
                if widened
                else GradientProducts(prescale="alpha")
            ),
            softmax=GradientSoftmax(exp="vexp"),
            sums=GradientSums(
                block_m=32,
                block_n=512,
                atomics=() if wide else ("dq", "dk", "dv"),
                atomics_dtype="float32" if wide else "input",
            ),
        ),
        contract=Contract(),
        allocates_outputs=True,
        available=lambda: missing_operator("_scaled_dot_product_flash_attention_for_cpu_backward"),
    )


VARIANTS = [
    _variant(saver, dtype) for saver in cpu_flash.VARIANTS for dtype in saver.support.dtypes
]

WITNESS = (
    {
        "case": (
            "torch-cpu-flash-backward-float32:default:gradients:b=3,hq=3,hkv=3,sq=1,skv=123,d=63,"
            "dtype=float32,dist=low_rank,seed=213066"
        ),
        "tensor": "dv",
        "r": 0.163,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "torch-cpu-flash-backward-float16:default:gradients:b=3,hq=2,hkv=2,sq=193,skv=193,"
            "d=15,dtype=float16,mask=dense.1.349,scale=4.0,lq=bshd,lk=bshd,lv=bshd,lo=bshd,"
            "ldo=bshd,dist=one_hot_v,seed=802"
        ),
        "tensor": "dq",
        "r": 0.988,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "torch-cpu-flash-backward-bfloat16:default:gradients:b=3,hq=2,hkv=2,sq=193,skv=193,"
            "d=15,dtype=bfloat16,mask=dense.1.349,scale=4.0,lq=bshd,lk=bshd,lv=bshd,lo=bshd,"
            "ldo=bshd,dist=one_hot_v,seed=802"
        ),
        "tensor": "dk",
        "r": 0.979,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "torch-cpu-flash-backward-float32-causal:default:gradients:b=3,hq=5,hkv=5,sq=81,"
            "skv=81,d=1,dtype=float32,mask=causal.tl,lq=bhsd.p4,lk=bhsd.p1.o1.xh,lv=bshd.p1.o1,"
            "lo=bshd.p4,ldo=bshd.p4,dist=small_integers,seed=475"
        ),
        "tensor": "dk",
        "r": 0.333,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "torch-cpu-flash-backward-float16-causal:default:gradients:b=2,hq=4,hkv=4,sq=144,"
            "skv=144,d=205,dtype=float16,mask=causal,scale=4.0,dist=subnormals,seed=1157"
        ),
        "tensor": "dk",
        "r": 0.991,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "torch-cpu-flash-backward-bfloat16-causal:default:gradients:sq=130,skv=108,d=15,"
            "dtype=bfloat16,mask=causal.tl,scale=1.0,lq=bhsd.p8.xb,lk=sbhd.p4.o1.xbh,"
            "lv=sbhd.p1.o1.xb,lo=bhsd.o8,ldo=bhsd.p4.o8,dist=v_mean,seed=29825"
        ),
        "tensor": "dq",
        "r": 0.976,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
)
