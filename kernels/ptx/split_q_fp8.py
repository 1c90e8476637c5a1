"""Tiling "split-q" for e4m3 and e5m2 inputs; O is in bfloat16.

It is split_q.py with both products in 8 bits (mma.m16n8k32), and q, k and v may come with factors
dq, dk and dv, per tensor or per batch and key head:

    c     = |softmax_scale log2 e dq dk|            in place of |softmax_scale| log2 e
    p     = 2^(s c - (m' c - 8))                    256 times as large: e4m3 keeps p down to 2^-17
    acc   = alpha acc + round(p) v                  to the inputs' dtype, which saturates
    O     = acc (dv / l),  LSE = ln 2 (m c + log2(l / 256))

The factor 256 is in l as well as in acc, so only the LSE takes it out, exactly.

P needs no shuffle and V no transposition of bytes in memory: P V adds its keys in another order,
and makes even and odd columns of O apart (docs/ptx.md, "8-bit P V").

mma.sync of 8 bits is an instruction of its own on sm_89, where sums keep 13 bits, and on sm_120.
Each product begins at zero and is added in fp32.  sm_90 and sm_100 convert to fp16 and do the same.
"""

from kernels.ptx.tiling import Tiling, config, fp8_variant

TILING = Tiling(name="split_q_fp8", query="tile", slots=2, element=1, spills={256: 276})

CONFIGS = (
    config(64, 64, 2),
    config(64, 64, 1, swizzle="none"),
    config(128, 32, 2, grid="heads"),
    config(128, 32, 1, swizzle="qk"),
)

VARIANT = fp8_variant(TILING, CONFIGS)

WITNESS = (
    {
        "case": (
            "ptx-split-q-fp8:m64n64s1-swizzle_none-grid_tiles:accuracy:b=2,hq=2,hkv=2,sq=186,"
            "skv=465,d=128,dtype=float8_e4m3fn,mask=causal.tl,lq=bshd,lk=bshd,lv=bshd,lo=bshd,"
            "ldo=bshd,descale=head,dist=outliers,seed=85"
        ),
        "tensor": "out",
        "r": 0.932,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
