"""A tiny Gluon kernel, right and with one fault each: it copies Q to O by way of shared memory.

It computes no attention: only sanitizers are asked of it. A block of the first kinds is one CTA;
"cluster" is two, which both get the same tile by one copy, and store half of it each. One run has
several blocks and each block copies two tiles through one buffer, so that a wait of the second
phase is in there too.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gluon import cluster
from kernels.gluon.ring import meet
from kernels.triton.common import Launch
from verify.variant import AttentionArgs, Support, Variant, Workspace

ROWS, COLUMNS, TILES = 64, 64, 2  # of a tile; tiles of a block
SUPPORT = Support(
    dtypes=("float32",),
    head_dims=(COLUMNS,),
    masks=("full",),
    layouts="contiguous",
    devices=("cuda",),
    capability=(9, 0),
    max_capability=(9, 0),
)
# By variant: how a tile comes, what is forgotten, and the CTAs of a cluster.
KINDS = {
    "planted-gluon-correct": ("tma", "nothing", 1),
    "planted-gluon-dropped-wait": ("tma", "wait", 1),
    "planted-gluon-early-copy-read": ("cp.async", "wait", 1),
    "planted-gluon-cluster-correct": ("tma", "nothing", 2),
    "planted-gluon-cluster-dropped-wait": ("tma", "wait", 2),
}
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_HALVES = [[1, 0]]  # of a cluster: rows that each CTA stores
_BOTH = [[0, 0]]  # a tile that each CTA has whole
_OWN = gl.constexpr([[1]])  # a barrier in each CTA
if cluster.unavailable() is None:
    _announce = cluster.announce_barriers
    _let_go = cluster.let_go
    _await_partner = cluster.await_partner
else:  # Triton looks at all that a kernel names, and this one has no cluster
    _announce = _let_go = _await_partner = meet


def _planted_gluon(  # noqa: PLR0912, PLR0917
    source,  # descriptor of (rows, COLUMNS), or a pointer to float32
    target,  # float32 (rows, COLUMNS), contiguous
    rows: gl.int32,
    IN: gl.constexpr,  # layouts of a tile: as it is read, as it is stored, in shared memory
    OUT: gl.constexpr,
    TILE: gl.constexpr,
    WAY: gl.constexpr,
    FORGOTTEN: gl.constexpr,
    CTAS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    num_warps: gl.constexpr,
):
    tile = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], TILE)
    if CTAS == 1:
        here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    else:
        here = gl.allocate_shared_memory(gl.int64, [2], mbarrier.MBarrierLayout(_OWN))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, IN))
    out_columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
    mbarrier.init(here, count=1)
    if CTAS == 1:
        fence_async_shared()
        meet()
    else:
        _announce()
        _await_partner()
    for turn in gl.static_range(TILES):
        first = (gl.program_id(0) * TILES + turn) * ROWS
        if WAY == "tma":
            mbarrier.expect(here, ROWS * COLUMNS * 4)
            if CTAS == 1:
                _load(source, [first, 0], here, tile)
            else:
                _load(source, [first, 0], here, tile, multicast=True)
            if FORGOTTEN != "wait":
                mbarrier.wait(here, turn & 1)
        else:
            row = first + gl.arange(0, ROWS, gl.SliceLayout(1, IN))
            places = source + row[:, None] * COLUMNS + columns[None, :]
            async_copy.async_copy_global_to_shared(tile, places, mask=(row < rows)[:, None])
            async_copy.commit_group()
            if FORGOTTEN != "wait":
                async_copy.wait_group(0)
        values = gl.convert_layout(tile.load(IN), OUT)
        if FORGOTTEN == "wait":  # too late, and before the tile is used again
            if WAY == "tma":
                mbarrier.wait(here, turn & 1)
            else:
                async_copy.wait_group(0)
        out_row = first + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        out_places = target + out_row[:, None] * COLUMNS + out_columns[None, :]
        gl.store(out_places, values, mask=(out_row < rows)[:, None])
        fence_async_shared(cluster=CTAS > 1)  # what was read, before the copy engine writes
        if CTAS == 1:
            meet()
        else:
            _let_go()
            _await_partner()
    mbarrier.invalidate(here)


kernel = gluon.jit(_planted_gluon, do_not_specialize=["rows"])


def launch_of(variant: str, source: Tensor, target: Tensor) -> Launch:
    """How that variant copies (rows, COLUMNS) elements; also of tensors without memory."""
    way, forgotten, ctas = KINDS[variant]
    rows = source.shape[0]
    given: object = source
    whole = _BOTH if ctas > 1 else []
    halves = _HALVES if ctas > 1 else []
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=32, rank=2, cga_layout=whole
    )
    if way == "tma":
        given = TensorDescriptor(source, [rows, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS], layout)
    keywords = {"WAY": way, "FORGOTTEN": forgotten, "CTAS": ctas, "num_warps": 4, "num_ctas": ctas}
    layouts = {
        "IN": gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0], cga_layout=whole),
        "OUT": gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0], cga_layout=halves),
        "TILE": layout,
    }
    sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS, "TILES": TILES}
    blocks = triton.cdiv(rows, ROWS * TILES)
    return Launch(kernel, blocks, (given, target, rows), keywords | sizes | layouts)


def forward(
    variant: str, args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace
) -> None:
    """The entry point of that variant."""
    copy_by(partial(launch_of, variant), args, out, lse)


def copy_by(
    launch: Callable[[Tensor, Tensor], Launch],
    args: AttentionArgs,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Copy Q to O by that launch, and zeros to the LSE."""
    SUPPORT.check(args, out)
    assert lse is not None
    lse.zero_()
    with torch.cuda.device_of(out):
        launch(args.q.reshape(-1, COLUMNS), out.view(-1, COLUMNS)).run()


def forward_of(variant: str) -> Callable[[AttentionArgs, Tensor, Tensor | None, Workspace], None]:
    """The entry point of that variant, without its name."""
    return partial(forward, variant)


def without_clusters() -> str | None:
    """Why the kinds with a cluster cannot be tried here, or None: ConSan knows it from 3.8 on."""
    numbers = tuple(map(int, triton.__version__.split(".")[:2]))
    old = f"Triton {triton.__version__}: its ConSan knows no cluster, that of 3.8 does"
    return cluster.unavailable() or (old if numbers < (3, 8) else None)


VARIANTS = [
    Variant(
        name=name,
        family="planted",
        forward=forward_of(name),
        support=SUPPORT,
        available=without_clusters if ctas > 1 else None,
    )
    for name, (_, _, ctas) in KINDS.items()
]
