"""FlashAttention-2 forward with log-sum-exp in CuTe: mma.sync, ldmatrix and cp.async of sm_80, as
layouts say.

A block of four warps owns BLOCK_M query rows of one head and walks over the keys in blocks of
BLOCK_N (Dao, arXiv 2307.08691, algorithm 1):

    s     = q . k                                 with the sign of softmax_scale
    m'    = max(m, max s)
    M     = fl(c m'),  c = |softmax_scale| log2 e what is subtracted
    p     = 2^(c s - M'),  alpha = 2^(M - M')     ex2.approx; c s - M' is one fused operation
    l     = alpha l + sum p                       p in fp32, before it is rounded
    acc   = alpha acc + round(p) v                p rounded to v's dtype, products accumulated in
                                                  fp32
    O     = acc (1 / l),  LSE = ln 2 (M + log2 l) once, at the end

A mask is a band between two diagonals or a table of the keys [low, high) of every row
(kernels/masks.py).  Both are plain arguments: one build takes every mask.  A block walks over the
blocks of keys that lie between the first key and the last key that one of its rows sees.  Keys
outside are never visited, and those from the last one on are not read.  Blocks that every row sees
whole need no comparison.

**Atoms and layouts** (CuTe's concepts: CUTLASS 4.2, media/docs/cpp/cute).

- `SM80_16x8x16_F32{F16F16,BF16BF16}F32_TN`, four warps along the rows.  `Tile<_64, _16, _16>` puts
  two atoms side by side, so that one `SM75_U32x4_LDSM_N` (ldmatrix.x4) fills an operand.  A lane
  holds two rows of an atom; four lanes share them.
- Q, K and V lie in shared memory in swizzled pieces of 64 columns, or of 32 where 64 does not
  divide the head dim (tiles.cuh), so that neither ldmatrix nor the copies meet a bank conflict.
- V is the right operand of P V: the same places under a transposed layout, read by
  `SM75_U16x8_LDSM_T` (ldmatrix.trans).
- Two accumulators of S side by side, exponentiated and rounded, are register for register one left
  operand of P V.
- `SM80_CP_ASYNC_CACHEGLOBAL_ZFILL`, 16 bytes a thread, 16 rows of 64 elements at once, or 32 of
  32; what lies past the end is zero-filled.
- Which row and key a register holds is asked of an identity tensor, partitioned as the accumulator
  is.  The keys that a row sees lie in shared memory, too: registers have no room for them.

**Copies.**  Two stages of K and of V.  K(i + 1) travels from S(i) to S(i + 1) and V(i + 1) from P
V(i) to P V(i + 1).  Two barriers per block make the copies of all threads visible to all; the first
also keeps the next copies from overwriting what a slower warp still reads.  O leaves through the
memory of Q, as whole rows.

A build is chosen by dtype, head dim and blocks; lengths, strides, mask, scale and heads are plain
arguments.  Head dims above 128 have blocks of 64 rows.  `cute-flash-forward-d64` is the same source
for head dims up to 64, whose registers hold the scores of 128 keys at a step; it leaves acc alone
where no row of a warp has a new maximum: every alpha is 1 there.  For Hopper no other build spills.
NVRTC takes some 16 s for each, most of it for CuTe's templates.  The headers are those of
CUTLASS_PATH, or of the package nvidia-cutlass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kernels.cuda.family import Family, Launch
from kernels.cute.family import (
    CONTRACT,
    ELEMENTS,
    HEAD_DIMS,
    NUMERICS,
    STAGES,
    SUPPORT,
    WARPS,
    available,
    compilable,
    cute_source,
)
from kernels.ptx.tiling import wide_scaling
from verify.cuda.compile import Source
from verify.variant import STRIDED, Build, Config, Variant, arch_named


def source(config: Config, dtype: str, head_dim: int) -> Source:
    """One build of flash_forward.cu; raises CompileError where headers are missing."""
    defines = {
        "ELEMENT": ELEMENTS[dtype],
        "HEAD_DIM": head_dim,
        "BLOCK_M": block_m(config, head_dim),
        "BLOCK_N": config.block_n,
        "SHARED_BYTES": shared_bytes(config, head_dim),
    }
    return cute_source(Path(__file__).with_suffix(".cu"), "flash_forward", defines)


def block_m(config: Config, head_dim: int) -> int:
    """Query rows of a block: O takes block_m head_dim / 128 of a thread's registers, so that head
    dims above 128 have 64 rows whatever the config says."""
    assert config.block_m is not None
    return min(config.block_m, 64) if head_dim > 128 else config.block_m


def shared_bytes(config: Config, head_dim: int) -> int:
    """Shared memory of a block: a tile of Q, one of K and of V per stage, and what rows see."""
    assert config.block_n is not None
    rows = block_m(config, head_dim)
    return 2 * head_dim * (rows + 2 * STAGES * config.block_n) + 8 * rows


def launch(config: Config, dtype: str, head_dim: int, kind: str, storage: str = STRIDED) -> Launch:
    """How a build is compiled and launched; kind and storage are those of all builds."""
    return Launch(
        source(config, dtype, head_dim),
        block_m(config, head_dim),
        32 * WARPS,
        shared_bytes(config, head_dim),
    )


def builds(arch: str) -> list[Build]:
    """One build of each head dim for Hopper, in which every config meets both dtypes; elsewhere the
    first two, which fit every architecture.

    The code is the same for every architecture, only ptxas differs, and one build takes as long as
    hundreds of other kernels'.
    """
    return _built(FAMILY, _BUILDS if arch == "sm_90a" else _BUILDS[:2], arch)


def builds_d64(arch: str) -> list[Build]:
    """Both head dims for Hopper; elsewhere the larger."""
    return _built(FAMILY_D64, _BUILDS_D64 if arch == "sm_90a" else _BUILDS_D64[:1], arch)


def _built(family: Family, chosen: Sequence[tuple[Config, str, int]], arch: str) -> list[Build]:
    capability = arch_named(arch).capability
    if capability is None or capability < family.support.capability:
        return []
    return [family.build((*choice, "", STRIDED), arch) for choice in chosen]


CONFIGS = (
    Config(block_m=64, block_n=64, num_warps=WARPS, num_stages=STAGES),
    Config(block_m=128, block_n=32, num_warps=WARPS, num_stages=STAGES),
    Config(block_m=128, block_n=64, num_warps=WARPS, num_stages=STAGES),
)
CONFIGS_D64 = (Config(block_m=128, block_n=128, num_warps=WARPS, num_stages=STAGES),)

_SMALL, _TALL, _LARGE = CONFIGS
# Those that need most registers first: of 128 rows, and, with Hopper's shared memory, of 64.
_BUILDS = (
    (_TALL, "float16", 128),
    (_SMALL, "bfloat16", 64),
    (_SMALL, "float16", 256),
    (_TALL, "bfloat16", 224),
    (_SMALL, "bfloat16", 192),
    (_TALL, "float16", 160),
    (_SMALL, "float16", 96),
    (_TALL, "bfloat16", 32),
    (_LARGE, "float16", 128),
    (_LARGE, "bfloat16", 96),
)
_BUILDS_D64 = ((*CONFIGS_D64, "float16", 64), (*CONFIGS_D64, "bfloat16", 32))

FAMILY = Family(
    configs=CONFIGS,
    support=SUPPORT,
    make=launch,
    kinds=dict.fromkeys(("full", "causal", "window", "interval"), ""),  # one build takes all
    in_bytes=False,
    scaling=wide_scaling,
)
FAMILY_D64 = replace(
    FAMILY,
    configs=CONFIGS_D64,
    support=replace(SUPPORT, head_dims=tuple(dim for dim in HEAD_DIMS if dim <= 64)),
    spill_budget={64: 192},  # sm_86 and sm_89; sm_90a 64
)

VARIANT = Variant(
    name="cute-flash-forward",
    family="cute",
    forward=FAMILY.forward,
    configs=CONFIGS,
    support=SUPPORT,
    numerics=NUMERICS,
    contract=CONTRACT,
    available=available,
    compilable=compilable,
    builds=builds,
    head_dim_buckets=HEAD_DIMS,
)
VARIANT_D64 = replace(
    VARIANT,
    name="cute-flash-forward-d64",
    forward=FAMILY_D64.forward,
    configs=CONFIGS_D64,
    support=FAMILY_D64.support,
    builds=builds_d64,
    head_dim_buckets=FAMILY_D64.support.head_dims,
)
VARIANTS = [VARIANT, VARIANT_D64]

WITNESS = (
    {
        "case": (
            "cute-flash-forward:m64n64w4s2:accuracy:b=2,hq=6,hkv=3,sq=159,skv=159,d=128,"
            "dtype=float16,scale=-1.0,dist=one_hot_v,seed=2630"
        ),
        "tensor": "out",
        "r": 0.996,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
