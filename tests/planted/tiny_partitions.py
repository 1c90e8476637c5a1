"""A tiny Gluon kernel of three partitions, right: each copies tiles of Q to O by way of a buffer
and a barrier of its own.

Nothing is shared between partitions but what Triton adds to start and to end them.  So a hazard
that a tool sees in it is Triton's, or false.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gluon.ring import close_ring, meet, open_ring
from kernels.triton.common import Launch
from tests.planted.tiny_gluon import COLUMNS, ROWS, SUPPORT, copy_by
from verify.variant import AttentionArgs, Variant, Workspace

PARTITIONS = gl.constexpr(3)
TILES = 4  # of each partition of a block


@gluon.jit
def _copy_tiles(
    shared,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    WHO: gl.constexpr,
    num_warps: gl.constexpr,
):
    source, target, rows, tiles, here = shared
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [num_warps, 1], [1, 0])
    tile = tiles.index(WHO)
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    for turn in range(TILES):
        first = ((gl.program_id(0) * PARTITIONS + WHO) * TILES + turn) * ROWS
        mbarrier.expect(here.index(WHO), ROWS * COLUMNS * 4)
        tma.async_copy_global_to_shared(source, [first, 0], here.index(WHO), tile)
        mbarrier.wait(here.index(WHO), turn & 1)
        row = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        places = target + row[:, None] * COLUMNS + columns[None, :]
        gl.store(places, tile.load(LAYOUT), mask=(row < rows)[:, None])
        fence_async_shared()  # what was read, before the copy engine writes
        meet()  # of this partition


def _planted_partitions(
    source,  # descriptor of (rows, COLUMNS)
    target,  # float32 (rows, COLUMNS), contiguous
    rows: gl.int32,
    TILE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    num_warps: gl.constexpr,  # of the first two partitions; the last one has one
):
    tiles = gl.allocate_shared_memory(gl.float32, [PARTITIONS, ROWS, COLUMNS], TILE)
    here = gl.allocate_shared_memory(gl.int64, [PARTITIONS, 1], mbarrier.MBarrierLayout())
    open_ring(here, PARTITIONS)
    fence_async_shared()
    meet()
    shared = source, target, rows, tiles, here
    gl.warp_specialize(
        [
            (_copy_tiles, (shared, ROWS, COLUMNS, TILES, 0, num_warps)),
            (_copy_tiles, (shared, ROWS, COLUMNS, TILES, 1, num_warps)),
            (_copy_tiles, (shared, ROWS, COLUMNS, TILES, 2, 1)),
        ],
        [num_warps, 1],
        [64, 64],
    )
    close_ring(here, PARTITIONS)


kernel = gluon.jit(_planted_partitions, do_not_specialize=["rows"])


def launch_of(source: Tensor, target: Tensor) -> Launch:
    """How it copies (rows, COLUMNS) elements; also of tensors without memory."""
    rows = source.shape[0]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    given = TensorDescriptor(source, [rows, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS], layout)
    sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS, "TILES": TILES}
    blocks = triton.cdiv(rows, PARTITIONS.value * ROWS * TILES)
    return Launch(kernel, blocks, (given, target, rows), {"TILE": layout, "num_warps": 4} | sizes)


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """The entry point."""
    copy_by(launch_of, args, out, lse)


VARIANT = Variant(
    name="planted-gluon-partitions", family="planted", forward=forward, support=SUPPORT
)
