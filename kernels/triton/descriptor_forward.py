"""FlashAttention-2 forward through tensor descriptors, in Triton: TMA on sm_90 and newer.

The algorithm, its roundings, masks and walk over the keys are those of `flash_forward`.  A tile of
q, k, v or out is moved by one instruction that knows the tensor's shape and strides: what lies
outside is read as 0 and not written.  On older architectures Triton makes masked loads of it.
There are two variants, for the two ways to a descriptor:

- host: `TensorDescriptor` describes a whole tensor in four dimensions.  K and V end at seqlen_kv,
  and keys that the mask hides are loaded with their block.
- device: a program makes descriptors of its own head by `tl.make_tensor_descriptor`, in memory that
  Triton asks an allocator for.  K and V end at the last key that a row of the tile sees.

A descriptor needs rows that begin at multiples of 16 bytes: other strides, and so head dims that 8
does not divide, are refused.  A build is chosen by dtype, head-dim bucket, mask kind and blocks
alone: strides come as multiples of 16, and are divided, as in `kernels.triton.tiles`.

The option `registers` of a config bounds what a thread gets (ptxas' maxnreg; 0: no bound), and
`warp_specialize` asks Triton to deal copies, products and softmax out to warps of their own
(`descriptor_builds`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.masks import mask_build, mask_tables
from kernels.triton import family
from kernels.triton.common import BUCKETS, LOG2_E, Blocks, Launch, counts, head_dim_bucket
from kernels.triton.compile import arguments, binary, meta
from kernels.triton.descriptor_builds import (
    BUILDS,
    CONFIGS,
    FURTHER,
    TUTORIAL_BUILDS,
    fitting,
    specialises,
    spill_budget,
)
from kernels.triton.online_softmax import finished, masked, started, stepped
from kernels.triton.tiles import block_at, blocks_of, key_walk, own_tile, seen_keys
from verify.variant import (
    AttentionArgs,
    Binary,
    Build,
    Config,
    Support,
    Variant,
    Workspace,
    arch_named,
)

_FACTOR = tl.constexpr(16)  # of whole numbers in a tuple, so that Triton builds once for all
_ROW = tl.constexpr(8)  # elements of 16 bytes, which divide strides and head dims


@triton.jit
def _described(  # noqa: PLR0917
    tensor,
    steps,
    batch,
    head,
    rows,
    dims,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    HOST: tl.constexpr,
):
    """The descriptor of that head's first `rows` rows of `dims` elements, in tiles of (ROWS, DIMS);
    the host's, of the whole tensor, as it comes."""
    if HOST:
        return tensor
    else:  # noqa: RET505 - Triton compiles what follows a return
        here = tensor + batch * _strides(steps[0]) + head * _strides(steps[1])
        return tl.make_tensor_descriptor(
            here, shape=[rows, dims], strides=[_strides(steps[2]), 1], block_shape=[ROWS, DIMS]
        )


@triton.jit
def _strides(step):
    """A stride in elements, a multiple of _ROW, from what `_steps` made of it."""
    return step // (_FACTOR // _ROW)


@triton.jit
def _place(steps, batch, head, row):
    """Where a tile begins in the host's descriptor; a dimension that all share has one place."""
    return [
        (batch * (steps[0] // _FACTOR)).to(tl.int32),
        (head * (steps[1] // _FACTOR)).to(tl.int32),
        row,
        0,
    ]


@triton.jit
def _loaded(
    tensor, steps, batch, head, row, ROWS: tl.constexpr, DIMS: tl.constexpr, HOST: tl.constexpr
):
    """The tile (ROWS, DIMS) from that row on."""
    if HOST:
        return tensor.load(_place(steps, batch, head, row)).reshape(ROWS, DIMS)
    else:  # noqa: RET505
        return tensor.load([row, 0])


@triton.jit
def _stored(  # noqa: PLR0917
    tensor,
    tile,
    steps,
    batch,
    head,
    row,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    HOST: tl.constexpr,
):
    """Write the tile (ROWS, DIMS) from that row on."""
    tile = tile.to(tensor.dtype)
    if HOST:
        tensor.store(_place(steps, batch, head, row), tile.reshape(1, 1, ROWS, DIMS))
    else:
        tensor.store([row, 0], tile)


def _descriptor_forward(  # noqa: PLR0917
    q,  # (batch, heads_q, seqlen_q, head_dim): its descriptor if HOST, else a pointer
    k,  # (batch, heads_kv, seqlen_kv, head_dim); so v and out
    v,
    out,
    lse,  # float32 (batch, heads_q, seqlen_q), contiguous
    tables,  # of the keys that rows see
    steps,  # of q, k, v and out (see `_steps`)
    head_dims,
    heads_q: tl.int32,
    group: tl.int32,  # query heads per key head
    seqlen_q: tl.int32,
    seqlen_kv: tl.int32,
    diagonal_low: tl.int32,  # row r sees keys from r + diagonal_low (KIND "window")
    diagonal_high: tl.int32,  # to r + diagonal_high, inclusive (KIND "causal" and "window")
    scale_log2: tl.float32,
    HOST: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPECIALIZE: tl.constexpr,  # whether Triton deals a loop out to warps of their own
):
    # The last tile first, since causal rows grow longer.
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    tile, head, batch = own_tile(tiles, heads_q)
    begin_q = (tiles - 1 - tile) * BLOCK_M
    head_kv = (head // group).to(tl.int64)

    # Rows past the end have the bounds of the last one, so that they do not widen the tile's.
    rows = begin_q + tl.arange(0, BLOCK_M)
    row = tl.minimum(rows, seqlen_q - 1)
    sizes = seqlen_q, seqlen_kv, diagonal_low, diagonal_high
    low, high = seen_keys(row, tables, batch, sizes, KIND)
    _first, last, walk = key_walk(low, high, seqlen_kv, BLOCK_N)

    dims = _strides(head_dims[0])
    dims_v = _strides(head_dims[1])
    q_all = _described(q, steps[0], batch, head, seqlen_q, dims, BLOCK_M, BLOCK_D, HOST)
    k_all = _described(k, steps[1], batch, head_kv, last, dims, BLOCK_N, BLOCK_D, HOST)
    v_all = _described(v, steps[2], batch, head_kv, last, dims_v, BLOCK_N, BLOCK_DV, HOST)
    o_all = _described(out, steps[3], batch, head, seqlen_q, dims_v, BLOCK_M, BLOCK_DV, HOST)

    q_tile = _loaded(q_all, steps[0], batch, head, begin_q, BLOCK_M, BLOCK_D, HOST)
    m, l, acc = started(BLOCK_M, BLOCK_DV)  # noqa: E741 - the paper's name
    for EDGE in tl.static_range(2):
        for i in tl.range(blocks_of(walk, EDGE), warp_specialize=SPECIALIZE):
            begin = block_at(walk, i, EDGE) * BLOCK_N
            k_tile = _loaded(k_all, steps[1], batch, head_kv, begin, BLOCK_N, BLOCK_D, HOST)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
            if EDGE == 1:
                x = masked(x, begin + tl.arange(0, BLOCK_N), low, high)
            v_tile = _loaded(v_all, steps[2], batch, head_kv, begin, BLOCK_N, BLOCK_DV, HOST)
            m, l, acc = stepped(x, v_tile, m, l, acc)  # noqa: E741

    o_tile, lse_rows = finished(m, l, acc)
    lse_rows = 0.6931471805599453 * lse_rows
    tl.store(lse + (batch * heads_q + head) * seqlen_q + rows, lse_rows, mask=rows < seqlen_q)
    _stored(o_all, o_tile, steps[3], batch, head, begin_q, BLOCK_M, BLOCK_DV, HOST)


# The pointers of a launch without host descriptors are aligned always, as SUPPORT demands.
descriptor_kernel = triton.jit(
    _descriptor_forward,
    do_not_specialize=(
        *("heads_q", "group", "seqlen_q", "seqlen_kv", "diagonal_low", "diagonal_high"),
    ),
    do_not_specialize_on_alignment=("lse",),
)


def _rows_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides that are legal in a descriptor, and reach the same elements.

    A dimension of one element, or one whose elements all lie in one place, has the size 1, and the
    stride of a packed row.
    """
    pairs = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    alone = [size == 1 or step == 0 for size, step in pairs]
    sizes = [1 if one else size for one, size in zip(alone, tensor.shape[:3], strict=True)]
    strides = [
        tensor.shape[3] if one else step
        for one, step in zip(alone, tensor.stride()[:3], strict=True)
    ]
    return (*sizes, tensor.shape[3]), (*strides, 1)


def _host_descriptor(tensor: Tensor, rows: int, bucket: int) -> TensorDescriptor:
    sizes, strides = _rows_of(tensor)
    return TensorDescriptor(tensor, [*sizes], [*strides], [1, 1, rows, bucket])


def _steps(tensor: Tensor, *, host: bool) -> tuple[int, ...]:
    """Of batch, head and sequence, as multiples of _FACTOR: for the host's descriptor whether the
    dimension has several places, else the strides, 0 for a dimension of one place."""
    sizes, strides = _rows_of(tensor)
    several = [size > 1 for size in sizes[:3]]
    if host:
        return tuple(_FACTOR.value * one for one in several)
    batch, head = (step * one for step, one in zip(strides[:2], several[:2], strict=True))
    return _multiples((batch, head, strides[2]))


def _multiples(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(_FACTOR.value // _ROW.value * number for number in numbers)


def launch(
    host: bool,
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor | None,
    capability: tuple[int, int] | None = None,
) -> Launch:
    """How the kernel is launched for these arguments; raises `Unsupported` outside SUPPORT.

    capability: of the device; None for none.
    """
    SUPPORT.check(args, out)
    mask = mask_build(args)
    bucket = head_dim_bucket(max(args.head_dim, args.head_dim_v))
    chosen = family.effective_blocks(args.config, args.dtype, bucket, bucket <= 128)
    blocks = fitting(chosen, bucket, capability)
    programs = args.batch * args.heads_q * triton.cdiv(args.seqlen_q, blocks.block_m)
    if not programs:
        return Launch(descriptor_kernel, 0, (), {})
    # A descriptor of no keys is illegal: Q stands in, and no block of it is loaded.
    tensors = [x if x.numel() else args.q for x in (args.q, args.k, args.v, out)]
    moved: Sequence[Any] = tensors
    if host:
        heights = blocks.block_m, blocks.block_n, blocks.block_n, blocks.block_m
        moved = [
            _host_descriptor(x, height, bucket) for x, height in zip(tensors, heights, strict=True)
        ]
    return Launch(
        descriptor_kernel,
        programs,
        (
            *(*moved, lse, mask_tables(args, mask)),
            tuple(_steps(x, host=host) for x in tensors),
            _multiples((args.head_dim, args.head_dim_v)),
            *counts(args, args.heads_q, mask),
            args.softmax_scale * LOG2_E,
        ),
        {
            "HOST": host,
            "SPECIALIZE": specialises(args.config, bucket, capability),
            **_keywords(args.config, blocks, mask.kind, bucket),
        },
    )


def _keywords(config: Config, blocks: Blocks, kind: str, bucket: int) -> dict[str, Any]:
    keywords = blocks.keywords(kind, bucket, True)
    del keywords["ALIGNED"]
    registers = int(dict(config.options).get("registers", 0))
    return keywords | ({"maxnreg": registers} if registers else {})


def forward(
    host: bool, args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace
) -> None:
    """Write O to `out` and the natural-log LSE to `lse`; raises `Unsupported` outside SUPPORT."""
    on_gpu = args.q.device.type == "cuda"
    capability = torch.cuda.get_device_capability(args.q.device) if on_gpu else None
    launched = launch(host, args, out, lse, capability)
    triton.set_allocator(partial(_scratch, args.q.device))
    with torch.cuda.device_of(args.q):
        launched.run()


def _scratch(device: torch.device, size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for the descriptors that programs make; torch aligns it to 512 bytes."""
    return torch.empty(size, dtype=torch.int8, device=device)


def builds(host: bool, arch: str) -> list[Build]:
    """Every config of CONFIGS and SPECIALISED, both dtypes, each kind of mask and several head
    dims; from sm_90 on by TMA, and some of the tutorial's grid."""
    found = []
    tma = arch not in ("sm_80", "sm_86", "sm_89")
    moves = ("UTMALDG",) if tma else ()
    for config, dtype, head_dim, kind in (*BUILDS, *(TUTORIAL_BUILDS if tma else ())):
        name = f"{config.name}, {dtype}, d {head_dim}, {kind}"
        compile_ = partial(_compile, host, config, dtype, head_dim, kind, arch)
        budget = spill_budget(name, host, arch)
        found.append(Build(name, compile_, budget, ("MMA", *moves)))
    return found


def _compile(host: bool, config: Config, dtype: str, head_dim: int, kind: str, arch: str) -> Binary:
    args = arguments(config, dtype, head_dim, kind)
    out = meta(tuple(args.q.shape), dtype)
    lse = meta(tuple(args.q.shape[:3]), "float32")
    return binary(launch(host, args, out, lse, arch_named(arch).capability), arch)


SUPPORT: Support = replace(
    family.SUPPORT,
    dtypes=("float16", "bfloat16"),
    head_dims=range(16, 257, 8),
    layouts="aligned",
)


def _variant(name: str, host: bool, judged: Config) -> Variant:
    return Variant(
        name=name,
        family="triton",
        forward=partial(forward, host),
        configs=(judged,),
        further_configs=lambda: FURTHER,
        support=SUPPORT,
        numerics=family.NUMERICS,
        # A descriptor's copy takes padding of the tensor as it lies there.
        contract=replace(family.CONTRACT, masked_values="finite"),
        builds=partial(builds, host),
        head_dim_buckets=BUCKETS,
    )


VARIANTS = [
    _variant("triton-host-descriptor-forward", True, CONFIGS[0]),
    _variant("triton-device-descriptor-forward", False, CONFIGS[1]),
]

WITNESS = (
    {
        "case": (
            "triton-host-descriptor-forward:m128n64w8s2-registers_0:accuracy:sq=310,skv=310,d=248,"
            "dtype=float16,mask=causal.tl+window.32.33,scale=0.0,dist=subnormals,seed=310"
        ),
        "tensor": "out",
        "r": 0.935,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "triton-host-descriptor-forward:m128n64w8s2-registers_0:accuracy:sq=310,skv=310,d=248,"
            "dtype=float16,mask=causal.tl+window.32.33,scale=0.0,dist=subnormals,seed=310"
        ),
        "tensor": "out",
        "r": 0.935,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
    {
        "case": (
            "triton-device-descriptor-forward:m64n32w4s3-registers_0:accuracy:sq=310,skv=310,"
            "d=248,dtype=float16,mask=causal.tl+window.32.33,scale=0.0,dist=subnormals,seed=310"
        ),
        "tensor": "out",
        "r": 0.935,
        "device": "AMD EPYC",
        "date": "2026-11-24",
    },
    {
        "case": (
            "triton-device-descriptor-forward:m64n32w4s3-registers_0:accuracy:sq=310,skv=310,"
            "d=248,dtype=float16,mask=causal.tl+window.32.33,scale=0.0,dist=subnormals,seed=310"
        ),
        "tensor": "out",
        "r": 0.935,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
