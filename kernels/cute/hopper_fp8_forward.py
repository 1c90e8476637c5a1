"""FlashAttention forward of e4m3 inputs with log-sum-exp in CuTe for Hopper: wgmma of 8 bits,
tensor copies, mbarriers; output in bfloat16 or float16.

It is hopper_forward.py with both products in 8 bits, as in FlashAttention-3 (Shah et al., arXiv
2407.08608, section 3.3).  q, k and v may come with factors dq, dk and dv, per tensor or per batch
and key head, and the attention is that of q dq, k dk and v dv:

    c     = |softmax_scale log2 e dq dk|, and the sums s = q . k take its sign

    producer, warp 0      K(t), V(t) into slot t % STAGES, as soon as they have been read there
    producer, warps 1-3   V(t) transposed into another slot, as soon as consumers have read it
    consumer, per block   m'    = max(m, max s)
                          p     = 2^(c s - (c m' - 8))       256 times as large; one fused
                                                             operation, ex2.approx
                          alpha = 2^(c (m - m'))
                          l     = alpha l + sum p            p in fp32, before its rounding
                          acc   = alpha acc + round(p) v     to e4m3, from 256 to 2^-9
    at the end            O     = acc (256 / l) (dv / 256),  LSE = ln 2 (c m + log2(l / 256))

**Two variants** differ in how P V is added up, because wgmma keeps 13 fraction bits of a sum of
8-bit products, those of its accumulator too:

- `cute-hopper-fp8-forward` begins the sum of every block of keys at zero, and fp32 adds it to acc:
  P V is promoted after BLOCK_N products.  Q K^T, one chain of head_dim products, is not.
- `cute-hopper-fp8-unpromoted-forward` adds all blocks in the accumulator of wgmma.  It loses the
  more, the more keys a row sees, and declares so: its promotion is 0.  It is there for comparison:
  docs/cute.md says what promotion costs, the reports what it buys.

**V** lies in rows of head_dim, and 8-bit operands of wgmma must run along the sum.  The warps that
transpose it load pairs of columns (ldmatrix.trans), take the pairs apart (prmt) and store rows of
keys (stmatrix).  Nothing else moves to make P fit: four neighbours of the sum, which a register of
the left operand has, are the four keys 2t, 2t + 1, 2t + 8, 2t + 9 whose scores lane t has.  V's
keys lie in the same order (hopper_fp8_tiles.cuh).  Rows of V transposed are the even columns of 16,
then the odd ones, so that stmatrix meets no bank conflict; a lane then has four neighbours of O.

**Masks** are those of hopper_forward.py.  V becomes zero where no row of the tile sees a key while
it is transposed.

**Tensor maps** have bytes as elements, and boxes of 128 columns with SWIZZLE_128B, or of 64 with
SWIZZLE_64B at head dim 64.

**The option** `overlap` is that of hopper_forward.py; it changes no bit of O or LSE.

docs/cute.md shows layouts and pipeline.  A build is chosen by variant, head dim and config.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.cuda.family import Family, Launch
from kernels.cute import hopper_forward
from kernels.cute.family import cute_source
from kernels.cute.hopper_forward import BLOCKS, WARPGROUPS, Hopper, option, slots
from kernels.masks import MaskBuild
from verify.cuda.compile import Source
from verify.variant import (
    STRIDED,
    AttentionArgs,
    Build,
    Config,
    Output,
    Variant,
    arch_named,
)

DTYPE = "float8_e4m3fn"
CONFIGS = (*BLOCKS, replace(BLOCKS[1], options=(("overlap", 1),)))


class Arguments(ctypes.Structure):
    """One problem, as hopper_fp8_forward.cu declares it."""

    _fields_ = hopper_forward.fields(("out_is_half", ctypes.c_int32))


class Hopper8(Hopper):
    """The builds, whose output has one of two dtypes."""

    def arguments(
        self,
        args: AttentionArgs,
        out: Tensor,
        lse: Tensor,
        mask: MaskBuild,
        tables: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Any:
        """The structure that a launch passes; the tensors must outlive the launch."""
        made = super().arguments(args, out, lse, mask, tables)
        made.out_is_half = out.dtype == torch.float16
        return made


def _bytes(config: Config, head_dim: int, slots: int) -> int:
    """One tile of Q, per slot one of K and two of V, the walk and the barriers, up to the alignment
    of the whole."""
    assert config.block_m is not None
    assert config.block_n is not None
    tiles = head_dim * (config.block_m + 3 * slots * config.block_n)
    return tiles + 1024 * math.ceil((16 + 8 * (1 + 6 * slots)) / 1024)


def source(config: Config, head_dim: int, *, promoted: bool) -> Source:
    """One build of hopper_fp8_forward.cu; raises CompileError where headers are missing."""
    defines = {
        "ELEMENT": "float_e4m3_t",
        "HEAD_DIM": head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": slots(config, partial(_bytes, config, head_dim)),
        "PERSISTENT": 0,
        "QUERY_SLOTS": 1,
        "OVERLAP": option(config, "overlap", head_dim),
        "PROMOTED": int(promoted),
    }
    return cute_source(Path(__file__).with_suffix(".cu"), "hopper_fp8_forward", defines)


def launch(
    config: Config,
    dtype: str,
    head_dim: int,
    kind: str,
    storage: str = STRIDED,
    *,
    promoted: bool = True,
) -> Launch:
    """How a build is compiled and launched; dtype, kind and storage are those of all builds."""
    assert config.block_m is not None
    bytes_of = partial(_bytes, config, head_dim)
    made = source(config, head_dim, promoted=promoted)
    return Launch(made, config.block_m, 128 * WARPGROUPS, bytes_of(slots(config, bytes_of)))


def builds(family: Family, chosen: list[tuple[Config, int]], arch: str) -> list[Build]:
    """Builds of these configs and head dims; for Hopper alone, whose instructions no other
    generation has."""
    if arch_named(arch).capability != SUPPORT.capability:
        return []
    return [
        family.build((config, DTYPE, head_dim, "", STRIDED), arch) for config, head_dim in chosen
    ]


SUPPORT = replace(
    hopper_forward.SUPPORT,
    dtypes=(DTYPE,),
    dtypes_out=("float16",),
    descalings=("none", "tensor", "head"),
)


def _variant(name: str, chosen: list[tuple[Config, int]], *, promoted: bool) -> Variant:
    """The variant whose P V is promoted, or not; chosen: its builds."""
    family = Hopper8(
        configs=CONFIGS,
        support=SUPPORT,
        make=partial(launch, promoted=promoted),
        kinds=hopper_forward.FAMILY.kinds,
        in_bytes=False,
        structure=Arguments,
        expects=("QGMMA", "UTMALDG", "LDSM", "STSM"),
    )
    # The arithmetic of the forward for 16 bits, but for what P is rounded to and what adds it up.
    numerics = hopper_forward.VARIANT.numerics
    return replace(
        hopper_forward.VARIANT,
        name=name,
        forward=family.forward,
        configs=CONFIGS,
        support=SUPPORT,
        numerics=replace(
            numerics,
            products=replace(numerics.products, promotion="block" if promoted else 0),
            # scale * log2(e) on the host, then the factors of q and k.  The LSE is made of another
            # product of the raw maximum than the exponents are.
            softmax=replace(
                numerics.softmax,
                scale_roundings=3,
                row_sum=replace(numerics.softmax.row_sum, lse="any"),
            ),
            output=Output(probability="input", probability_scale=256.0, roundings=1),
        ),
        builds=partial(builds, family, chosen),
    )


_SMALL, _LARGE, _OVERLAP = CONFIGS

PROMOTED = _variant(
    "cute-hopper-fp8-forward",
    [
        (_LARGE, 128),
        (_LARGE, 256),
        (_SMALL, 256),
        (_LARGE, 64),
        (_SMALL, 64),
        (_OVERLAP, 128),
        (_OVERLAP, 64),
    ],
    promoted=True,
)
UNPROMOTED = _variant(
    "cute-hopper-fp8-unpromoted-forward",
    [(_LARGE, 128), (_LARGE, 256), (_SMALL, 64), (_OVERLAP, 128)],
    promoted=False,
)
VARIANTS = [PROMOTED, UNPROMOTED]

WITNESS = (
    {
        "case": (
            "cute-hopper-fp8-forward:m128n64w12s2:accuracy:b=3,hq=12,hkv=4,sq=80,skv=129,d=64,"
            "dtype=float8_e4m3fn,mask=lengths.79_63_79.32_1_1,lk=bhsd.xb,lv=bhsd.p16.xb,lo=sbhd,"
            "out=float16,descale=head,dist=small_integers,seed=1553"
        ),
        "tensor": "out",
        "r": 0.708,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "cute-hopper-fp8-unpromoted-forward:m128n64w12s2:accuracy:b=3,hq=12,hkv=4,sq=80,"
            "skv=129,d=64,dtype=float8_e4m3fn,mask=lengths.79_63_79.32_1_1,lk=bhsd.xb,"
            "lv=bhsd.p16.xb,lo=sbhd,out=float16,descale=head,dist=small_integers,seed=1553"
        ),
        "tensor": "out",
        "r": 0.708,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
