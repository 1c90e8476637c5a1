"""FlashAttention-2 forward of 8-bit inputs with log-sum-exp on Hopper's own units, in Gluon.

q, k and v are in e4m3 or e5m2, and V lies as (batch, heads_kv, head_dim_v, seqlen_kv): the storage
`transposedv`.  Both 8-bit operands of wgmma must run along the sum, which for P V are the keys; the
copy engine brings such a tile of V as it lies, and no tile is transposed.

The arithmetic is that of `triton-fp8-transposed-block-forward`, with its factors
(kernels/triton/fp8_forward.py has the formulas), in fewer instructions: the 256 of P is 8 in its
exponent, a score and its exponent are one fma, and so are the rescale of O and the sum of a block.
wgmma keeps 13 fraction bits of an 8-bit sum.  S is one such sum over the head dim.  P V of each
block begins at zero, and its result is added to O in fp32: the promotion "block".

Ring, barriers and walk are those of `hopper_forward` (docs/gluon.md), with S of the next block in
the tensor cores during the exponentials of this one, and its maxima made during P V.  Where
seqlen_kv is even, a tile of K has its even rows first, which spares P an exchange between lanes
(`even_first`).  O and P V of a block are held at once: at a head dim of 256 that would be 256
registers, so head dims end at 128.
"""

from dataclasses import replace
from functools import partial

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gluon import hopper_forward, host
from kernels.gluon.columns import fetch_columns, hide_columns
from kernels.gluon.even_first import fetch_keys, left_operand
from kernels.gluon.host import (
    UNSPECIALIZED,
    bucket_of,
    builds_of,
    descriptor,
    descriptor_even_first,
    keywords,
    run,
    scalars,
)
from kernels.gluon.ring import await_tile, close_ring, fetch, meet, nth_block, open_ring
from kernels.gluon.rows import own_place, own_rows, store_lse, store_out
from kernels.gluon.softmax import lifted_signed, signed_scale, signed_scores
from kernels.masks import mask_build, mask_tables
from kernels.triton.common import Launch, steps
from kernels.triton.compile import arguments, binary, meta
from kernels.triton.tiles import blocks_of, head_of, key_walk
from verify.variant import (
    AttentionArgs,
    Binary,
    Build,
    Config,
    Descales,
    Output,
    Stored,
    Workspace,
)

STORAGE = "transposedv"
BUCKETS = (64, 128)


@gluon.jit
def descale(factors, factor_steps, batch, head_kv, NUMBER: gl.constexpr):
    """The factor of that tensor of q, k and v."""
    return gl.load(head_of(factors[NUMBER], factor_steps[NUMBER], batch, head_kv, False))


def _hopper_fp8_forward(  # noqa: PLR0915, PLR0917
    q,  # descriptors of (batch, heads_q, seqlen_q, head_dim)
    k,  # and (batch, heads_kv, seqlen_kv, head_dim)
    v,  # and (batch, heads_kv, head_dim_v, seqlen_kv)
    out,  # (batch, heads_q, seqlen_q, head_dim_v)
    lse,  # float32 (batch, heads_q, seqlen_q), contiguous
    tables,  # of the keys that rows see
    # factors of q, k and v, float32 (batch, heads_kv), any strides; None if there are none
    factors,
    factor_steps,
    out_batch: gl.int64,  # strides of out, and head_dim_v, in units of ROW_UNIT elements
    out_head: gl.int64,
    out_row: gl.int64,
    dim_v: gl.int32,
    heads_q: gl.int32,
    group: gl.int32,
    seqlen_q: gl.int32,
    seqlen_kv: gl.int32,
    diagonal_low: gl.int32,
    diagonal_high: gl.int32,
    scale_log2: gl.float32,
    EVEN_FIRST: gl.constexpr,
    KIND: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    DTYPE: gl.constexpr = q.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_N, 32]
    )
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_D, 32]
    )
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=4)
    # 16 bytes per thread, whole rows per warp: of O on its way out, and of V where keys are hidden.
    OUT_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [num_warps, 1], [1, 0]
    )
    V_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 16], [512 // BLOCK_N, BLOCK_N // 16], [num_warps, 1], [1, 0]
    )
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    # A row of a tile is one piece of its swizzle: head_dim bytes of Q and K, BLOCK_N of V.
    TILE: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=BLOCK_D, element_bitwidth=8, rank=2
    )
    V_TILE: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=BLOCK_N, element_bitwidth=8, rank=2
    )

    tile, head, head_kv, batch = own_place(seqlen_q, heads_q, group, BLOCK_M)
    sizes = seqlen_q, seqlen_kv, diagonal_low, diagonal_high
    rows, low, high = own_rows(tile, tables, batch, sizes, KIND, BLOCK_M, S_ROWS)
    first, last, walk = key_walk(low, high, seqlen_kv, BLOCK_N)
    total = blocks_of(walk, 0) + blocks_of(walk, 1)

    q_tile = gl.allocate_shared_memory(DTYPE, [BLOCK_M, BLOCK_D], TILE)
    k_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_D], TILE)
    v_ring = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_D, BLOCK_N], V_TILE)
    q_here = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    open_ring(q_here, 1)
    open_ring(k_here, STAGES)
    open_ring(v_here, STAGES)
    fence_async_shared()
    meet()

    batch32 = batch.to(gl.int32)
    fetch(q, batch32, head, tile * BLOCK_M, q_here.index(0), q_tile, total > 0)
    for stage in gl.static_range(STAGES):
        key = nth_block(walk, stage) * BLOCK_N
        more = stage < total
        k_tile = k_ring.index(stage)
        fetch_keys(k, batch32, head_kv, key, k_here.index(stage), k_tile, more, EVEN_FIRST)
        fetch_columns(v, batch32, head_kv, key, v_here.index(stage), v_ring.index(stage), more)

    factor = scale_log2
    factor_v = 0.00390625  # 1 / 256
    if factors is not None:
        head64 = head_kv.to(gl.int64)
        factor = factor * descale(factors, factor_steps, batch, head64, 0)
        factor = factor * descale(factors, factor_steps, batch, head64, 1)
        factor_v = factor_v * descale(factors, factor_steps, batch, head64, 2)

    sign, size = signed_scale(factor)
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, S_ROWS)
    l = gl.zeros([BLOCK_M], gl.float32, S_ROWS)  # noqa: E741 - the paper's name
    acc = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, O_LAYOUT)
    no_s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
    no_o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, O_LAYOUT)
    if total > 0:
        mbarrier.wait(q_here.index(0), 0)
        slot = await_tile(k_here, 0, STAGES)
        k_tile = k_ring.index(slot)
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        meet()  # every warp has read the first tile of K
        ahead = nth_block(walk, STAGES) * BLOCK_N
        more = total > STAGES
        fetch_keys(k, batch32, head_kv, ahead, k_here.index(slot), k_tile, more, EVEN_FIRST)
        x = signed_scores(s, sign, walk, 0, low, high, BLOCK_N, S_LAYOUT, EVEN_FIRST)
        top, m, shift, alpha = lifted_signed(x, m, m, size)

        for t in range(1, total):
            slot = await_tile(k_here, t, STAGES)
            k_tile = k_ring.index(slot)
            s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), no_s, use_acc=False, is_async=True)
            p = gl.exp2(gl.fma(x, size, (8.0 - shift)[:, None]))
            l = l * alpha + gl.sum(p, 1)  # noqa: E741
            p_tile = left_operand(p, DTYPE, P_LAYOUT, EVEN_FIRST)
            last_slot = await_tile(v_here, t - 1, STAGES)
            v_tile = v_ring.index(last_slot)
            hide_columns(v_tile, nth_block(walk, t - 1) * BLOCK_N, first, last, V_LAYOUT)
            # From zero, and added in fp32: 13 bits hold the sums of one block.
            o = warpgroup_mma(p_tile, v_tile.permute((1, 0)), no_o, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            x = signed_scores(s, sign, walk, t, low, high, BLOCK_N, S_LAYOUT, EVEN_FIRST)
            shrink = alpha
            top, m, shift, alpha = lifted_signed(x, top, m, size)
            o = warpgroup_mma_wait(0, deps=(o,))
            meet()  # every warp has read both tiles
            more = t - 1 + STAGES < total
            fetch_columns(v, batch32, head_kv, ahead, v_here.index(last_slot), v_tile, more)
            ahead = nth_block(walk, t + STAGES) * BLOCK_N
            more = t + STAGES < total
            fetch_keys(k, batch32, head_kv, ahead, k_here.index(slot), k_tile, more, EVEN_FIRST)
            acc = gl.fma(acc, gl.convert_layout(shrink, O_ROWS)[:, None], o)

        p = gl.exp2(gl.fma(x, size, (8.0 - shift)[:, None]))
        l = l * alpha + gl.sum(p, 1)  # noqa: E741
        p_tile = left_operand(p, DTYPE, P_LAYOUT, EVEN_FIRST)
        v_tile = v_ring.index(await_tile(v_here, total - 1, STAGES))
        hide_columns(v_tile, nth_block(walk, total - 1) * BLOCK_N, first, last, V_LAYOUT)
        o = warpgroup_mma(p_tile, v_tile.permute((1, 0)), no_o, use_acc=False, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        acc = gl.fma(acc, gl.convert_layout(alpha, O_ROWS)[:, None], o)
        meet()  # no warp waits at a barrier any more

    close_ring(q_here, 1)
    close_ring(k_here, STAGES)
    close_ring(v_here, STAGES)

    place = batch, head, tile
    denominator = store_lse(lse, m, l * 0.00390625, place, heads_q, rows, seqlen_q)
    o_tile = acc / gl.convert_layout(denominator, O_ROWS)[:, None] * factor_v
    strides = out_batch, out_head, out_row, dim_v
    store_out(out, o_tile, strides, place, seqlen_q, BLOCK_M, BLOCK_D, OUT_LAYOUT)


kernel = gluon.jit(_hopper_fp8_forward, **UNSPECIALIZED)


effective_blocks = partial(host.effective_blocks, itemsize=1)


def launch(args: AttentionArgs, out: Tensor, lse: Tensor | None) -> Launch:
    """How the kernel is launched for these arguments, which have a query and a key; raises
    `Unsupported`."""
    mask = mask_build(args)
    bucket = bucket_of(args, BUCKETS)
    blocks = effective_blocks(args.config, bucket)
    even = args.seqlen_kv % 2 == 0
    factors: tuple[Tensor, ...] | None = None
    factor_steps: tuple[tuple[int, ...], ...] | None = None
    if args.descales is not None:
        factors = (args.descales.q, args.descales.k, args.descales.v)
        factor_steps = steps(*factors, aligned=False)
    return Launch(
        kernel,
        args.batch * args.heads_q * triton.cdiv(args.seqlen_q, blocks.block_m),
        (
            descriptor("q", args.q, blocks.block_m, bucket),
            (descriptor_even_first if even else descriptor)("k", args.k, blocks.block_n, bucket),
            descriptor("v", args.stored["v"].tensors[""], bucket, blocks.block_n),
            *(out, lse, mask_tables(args, mask)),
            *(factors, factor_steps),
            *scalars(args, out, mask),
        ),
        {"BLOCK_M": blocks.block_m, "EVEN_FIRST": even} | keywords(mask, blocks, bucket),
    )


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """Write O to `out` and the natural-log LSE to `lse`; raises `Unsupported` outside SUPPORT."""
    SUPPORT.check(args, out)
    run(launch, args, out, lse)


def builds(arch: str) -> list[Build]:
    """Each config at each bucket, so that each dtype, kind of mask and output occurs, with factors
    per head, and of an odd number of keys, too; for Hopper alone."""
    words = "QGMMA", "UTMALDG"
    of_odd = partial(_compile, odd=True)
    even = builds_of(VARIANT, _BUILDS, _compile, _SPILL_BUDGETS, words, arch)
    odd = builds_of(VARIANT, _ODD_BUILDS, of_odd, _SPILL_BUDGETS, words, arch, ", odd")
    return even + odd


_BUILDS: tuple[tuple[int, str, int, str, str], ...] = (
    (0, "float8_e4m3fn", 128, "full", "bfloat16"),
    (0, "float8_e5m2", 128, "causal", "float16"),
    (0, "float8_e4m3fn", 64, "window", "bfloat16"),
    (1, "float8_e4m3fn", 128, "full", "bfloat16"),
    (1, "float8_e5m2", 128, "causal", "float16"),
    (1, "float8_e4m3fn", 64, "interval", "bfloat16"),
    (2, "float8_e4m3fn", 128, "window", "bfloat16"),
    (2, "float8_e4m3fn", 64, "full", "bfloat16"),
    (2, "float8_e5m2", 64, "causal", "float16"),
    (3, "float8_e4m3fn", 128, "interval", "bfloat16"),
    (3, "float8_e5m2", 64, "window", "bfloat16"),
    (4, "float8_e4m3fn", 128, "causal", "float16"),
    (4, "float8_e5m2", 64, "full", "bfloat16"),
)
_ODD_BUILDS: tuple[tuple[int, str, int, str, str], ...] = (
    (0, "float8_e4m3fn", 128, "causal", "bfloat16"),
    (2, "float8_e5m2", 128, "full", "bfloat16"),
    (3, "float8_e4m3fn", 64, "full", "bfloat16"),
)

_SPILL_BUDGETS: dict[str, int] = {}  # bytes per thread: the most of Triton 3.6 and 3.7


def _compile(
    config: Config,
    dtype: str,
    head_dim: int,
    kind: str,
    dtype_out: str,
    arch: str,
    *,
    odd: bool = False,
) -> Binary:
    args = arguments(config, dtype, head_dim, kind)
    columns = meta(tuple(args.v.mT.shape), dtype)
    if odd:
        args = replace(args, k=args.k[:, :, :-1], v=args.v[:, :, :-1])
        columns = columns[..., :-1]
    factors = Descales(*(meta((args.batch, args.heads_kv), "float32") for _ in "qkv"))
    stored = {"v": Stored(STORAGE, STORAGE, {"": columns}, ("v",))}
    out = meta(tuple(args.q.shape), dtype_out)
    lse = meta(tuple(args.q.shape[:3]), "float32")
    return binary(launch(replace(args, descales=factors, stored=stored), out, lse), arch)


SUPPORT = replace(
    hopper_forward.SUPPORT,
    dtypes=("float8_e4m3fn", "float8_e5m2"),
    dtypes_out=("float16",),
    descalings=("none", "tensor", "head"),
    head_dims=range(16, 129, 16),
    storages=(STORAGE,),
)

_NUMERICS = hopper_forward.VARIANT.numerics

VARIANT = replace(
    hopper_forward.VARIANT,
    name="gluon-hopper-fp8-forward",
    forward=forward,
    configs=(
        Config(block_m=64, block_n=128, num_warps=4, num_stages=2),
        Config(block_m=128, block_n=64, num_warps=8, num_stages=4),
        Config(block_m=128, block_n=128, num_warps=8, num_stages=2),
        Config(block_m=64, block_n=64, num_warps=4, num_stages=3),
        Config(block_m=64, block_n=128, num_warps=4, num_stages=1),
    ),
    support=SUPPORT,
    numerics=replace(
        _NUMERICS,
        products=replace(_NUMERICS.products, promotion="block"),
        # scale * log2(e) on the host, then the factors of q and k
        softmax=replace(_NUMERICS.softmax, scale_roundings=3),
        output=Output(probability="input", probability_scale=256.0, roundings=1),
    ),
    builds=builds,
    head_dim_buckets=BUCKETS,
)

WITNESS = (
    {
        "case": (
            "gluon-hopper-fp8-forward:m64n64w4s3:accuracy:hq=6,hkv=2,sq=406,skv=63,d=128,"
            "dtype=float8_e4m3fn,scale=4.0,lv=transposedv,descale=head,dist=below_sentinel,"
            "seed=1830"
        ),
        "tensor": "out",
        "r": 0.96,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-28",
    },
)
