"""FlashAttention-2 forward with log-sum-exp from raw PTX instructions, in six tilings.

A block owns block_m query rows of one head and walks over the keys in blocks of block_n (Dao, arXiv
2307.08691, algorithm 1 and section 3.3), keeping per row the running maximum m, the running
denominator l and the un-normalised output acc:

    s     = q . k                               of q with the scale's sign
    m'    = max(m, max s)
    p     = 2^(s c - m' c),  alpha = 2^((m - m') c)     c = |softmax_scale| log2 e; s c - fl(m' c)
                                                is one fused operation, ex2.approx
    l     = alpha l + sum p                     p in fp32, before it is rounded
    acc   = alpha acc + round(p) v              p rounded to v's dtype, products accumulated in fp32
    O     = acc (1 / l),  LSE = ln 2 (m c + log2 l)

l and acc are not multiplied where no row of a warp has a new maximum: every alpha is 1 there.

Most variants have a twin whose products accumulate in fp16 ("-f16"): there q is multiplied by the
scale and rounded before Q K^T, so that the sums are scores and overflow only where scores do; each
block's P V starts at zero, and is added to acc in fp32.

**Fragments** (layouts in kernels/cuda/ptx.cuh; g = lane / 4, t = lane % 4).  mma.m16n8k16 makes 16
rows x 8 columns: a lane holds rows g and g + 8, columns 2t and 2t + 1, of S as of O.  So four lanes
hold a row: its maximum takes two shuffles per block of keys; its sum is kept per lane and added up
at the end.  Two neighbouring 8-key tiles of S, exponentiated and rounded, are register for register
the 16x16 left operand of P V.  A warp can own several tiles of 16 rows, and reads K and V once for
all of them.

**Shared memory**.  What a step of the loop reads is an item, in a ring of slots: the items of the
next slots - 1 steps travel (cp.async, 16 bytes each) while a step computes.  The tilings differ in
what an item is, and in where Q stays:

    split-q       Q in a tile; items K, V         2 stages slots; every warp has rows of its own
    split-kv      the same; warps in pairs share rows, and divide the keys and O's columns
    share-kv      Q in a tile; items K, V         stages slots
    share-qkv     Q through the slots first       stages slots
    tiling-qk     items (Q, K)[:, depth]; V in a tile, filled slice by slice beside them
    tiling-qkv    items (Q, K)[:, depth], V[:, width]

Rows lie padded by 16 bytes, or swizzled; either way the eight rows of an 8x8 matrix lie in
different banks (tile.cuh).  At head dims 512 and more a warp's registers cannot hold O for all
columns: four warps share a row and divide them, and exchange P, maxima and sums through shared
memory, as split-kv does at all head dims.

Masks are a band between two diagonals or a table of intervals (kernels/masks.py).  Blocks that
every row of the tile sees whole need no mask; those that no row sees are not visited, nor are keys
outside them read.

A build is chosen by dtype, head dim, kind of mask, storage of K and config; lengths, strides, scale
and heads are plain arguments.  Transposed K, (batch, heads, head_dim, seqlen), comes into a tile
whose rows are columns of head_dim, and ldmatrix transposes it back, as it does V.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from kernels.cuda.family import LOG2_E, Family, Launch
from verify.cuda.compile import Source, available, compilable
from verify.variant import (
    STRIDED,
    Config,
    Contract,
    Maximum,
    Numerics,
    Order,
    Output,
    Products,
    RowSum,
    Softmax,
    Support,
    Variant,
)

ELEMENT = 2  # bytes
PAD = 16  # bytes, of a padded row
OUT_ELEMENTS = 1 << 15  # of O that a block can own: 128 registers of each of 256 threads
HEAD_DIMS = (32, 64, 96, 128, 256)
WIDE_HEAD_DIMS = (*HEAD_DIMS, 512, 1024)
KINDS = {"full": "full", "causal": "band", "window": "band", "interval": "table"}
# The complete product: the values of each part of a config.
BLOCKS_M = (64, 128)
BLOCKS_N = (32, 64, 128)
STAGES = (1, 2)
WARPS = (None, 4, 8)
SWIZZLES = ("none", "q", "qk", "qkv")
GRIDS = ("tiles", "heads")
DEPTHS = (16, 32, 64, 128)
ROOM = 227 * 1024  # bytes of shared memory that a block of sm_90 can have
# Of a thread's 255, for what `Tiling.registers` counts: no build with these has been seen to spill.
REGISTERS = 160


@dataclass(frozen=True)
class Shape:
    """What a config becomes at a head dim.

    warps_m, warps_n: warps that share the rows; warps that share keys and columns.
    depth, width: columns of Q and K, and of V, in an item.
    """

    block_m: int
    block_n: int
    warps_m: int
    warps_n: int
    depth: int
    width: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiling:
    """What a .cu file of this folder says, for the host.

    query: where Q stays: in a "tile", going through the "ring", or "sliced" with K.
    q_kept: whether registers keep Q's fragments, up to head dim 128.
    v_tile: whether V, which is then no item, has a tile.
    slots: of the ring, per stage.
    warps_n: warps that share a row's keys, at head dims below 512.
    element: bytes of an element of Q, K and V.
    spills: bytes that the worst of `Family.builds` spills on any architecture (NVRTC 13.0), by head
    dim; none elsewhere.  narrow_spills: the same where products accumulate in fp16.
    """

    name: str
    query: str
    q_kept: bool = False
    v_tile: bool = False
    slots: int = 1
    warps_n: int = 1
    element: int = ELEMENT
    spills: Mapping[int, int] = field(default_factory=dict)
    narrow_spills: Mapping[int, int] = field(default_factory=dict)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The head dims that it is built for."""
        return WIDE_HEAD_DIMS if self.query == "sliced" else HEAD_DIMS

    def shape(self, config: Config, head_dim: int) -> Shape:
        """A warp owns O of so many rows that it takes 64 registers of a thread, or 128 where a tile
        of 16 rows takes more; a block has 4 to 8 warps, or num_warps at head dims up to 128."""
        assert config.block_m is not None
        assert config.block_n is not None
        block_m = min(config.block_m, OUT_ELEMENTS // head_dim)
        warps = 4 if block_m * head_dim <= OUT_ELEMENTS // 4 else 8
        if config.num_warps is not None and head_dim <= 128:
            warps = config.num_warps
        warps_n = self.warps_n if head_dim < 512 else 4
        warps_m = min(warps // warps_n, block_m // 16)
        depth = width = head_dim
        if self.query == "sliced":
            most = min(int(dict(config.options)["depth"]), head_dim // 2)
            depth = next(each for each in range(most, 0, -16) if head_dim % each == 0)
            widths = range(16 * warps_n, head_dim + 1, 16 * warps_n)
            fitting = [each for each in widths if head_dim % each == 0 and each <= 2 * depth]
            width = max(fitting, default=widths[0])
        return Shape(block_m, config.block_n, warps_m, warps_n, depth, width)

    def launch(
        self, config: Config, dtype: str, head_dim: int, kind: str, storage: str, *, narrow: bool
    ) -> Launch:
        """How a build is compiled and launched; narrow: products accumulate in fp16."""
        shape = self.shape(config, head_dim)
        options = dict(config.options)
        shared_bytes = self.shared_bytes(config, head_dim, storage)
        rows = {
            f"ROWS_{operand.upper()}": (
                "swizzled" if operand in str(options["swizzle"]) else "padded"
            )
            for operand in "qkv"
        }
        accumulator = "Narrow" if narrow else "Wide"
        defines = {
            "FORMAT": dtype,
            "HEAD_DIM": head_dim,
            "BLOCK_M": shape.block_m,
            "BLOCK_N": shape.block_n,
            "STAGES": config.num_stages,
            "WARPS_M": shape.warps_m,
            "WARPS_N": shape.warps_n,
            "QK_DEPTH": shape.depth,
            "V_WIDTH": shape.width,
            "MASK": kind,
            "K_STORAGE": storage,
            **rows,
            "HEADS_FIRST": int(options["grid"] == "heads"),
            "SCORES": accumulator,
            "VALUES": accumulator,
            "SHARED_BYTES": shared_bytes,
        }
        macros = tuple((name, str(value)) for name, value in defines.items())
        source = Source(Path(__file__).with_name(f"{self.name}.cu"), self.name, macros)
        return Launch(source, shape.block_m, shape.threads, shared_bytes)

    def shared_bytes(self, config: Config, head_dim: int, storage: str = STRIDED) -> int:
        """Dynamic shared memory of a block, as `Memory` in flash.cuh lays it out."""
        shape = self.shape(config, head_dim)
        assert config.num_stages is not None
        swizzled = str(dict(config.options)["swizzle"])

        def tile(operand: str, rows: int, columns: int) -> int:
            return rows * (columns * self.element + PAD * (operand not in swizzled))

        slots = self.slots * config.num_stages
        k_shape = shape.block_n, shape.depth
        k_slice = tile("k", *(k_shape if storage == STRIDED else k_shape[::-1]))
        q_slice = tile("q", shape.block_m, shape.depth)
        v_slice = tile("v", shape.block_n, head_dim if self.v_tile else shape.width)
        item = k_slice + (q_slice if self.query == "sliced" else 0)
        ring = slots * (item if self.v_tile else max(item, v_slice))
        if self.query == "ring":
            ring = max(ring, tile("q", slots * shape.block_n, head_dim))
        return sum(
            (
                q_slice if self.query == "tile" else 0,
                ring,
                v_slice if self.v_tile else 0,
                (shape.block_m * shape.block_n * self.element if shape.warps_n > 1 else 0),
                (4 * shape.warps_n * shape.block_m if shape.warps_n > 1 else 0),
            )
        )

    def registers(self, config: Config, head_dim: int, *, narrow: bool) -> int:
        """Registers of a thread that O, S, P and a Q that is kept would take at once, and with
        narrow accumulators a block's sums of P V: an upper estimate, up to head dim 128."""
        shape = self.shape(config, head_dim)
        columns = head_dim // shape.warps_n  # of O, a warp's
        out = columns // 2
        scores = shape.block_n // shape.warps_n // 2
        kept = head_dim // 4 if self.q_kept else 0
        parts = min(columns, shape.width // shape.warps_n) // 4 if narrow else 0
        row_tiles = shape.block_m // (16 * shape.warps_m)
        return row_tiles * (out + scores + shape.block_n // 4 + kept + parts)

    @cache  # noqa: B019 - tilings are module constants
    def product(self, *, narrow: bool) -> dict[str, Config]:
        """Every config that compiles, by name: all combinations of BLOCKS_M ... and GRIDS, and of
        DEPTHS where Q and K are sliced, that leave enough shared memory at every head dim, and
        registers up to head dim 128.  `shape` makes of any of them what pipeline.cuh asserts."""
        depths = [{"depth": each} for each in DEPTHS] if self.query == "sliced" else [{}]
        found: dict[str, Config] = {}
        for *numbers, swizzle, depth in itertools.product(
            BLOCKS_M, BLOCKS_N, STAGES, WARPS, SWIZZLES, depths
        ):
            made = [config(*numbers, swizzle=swizzle, grid=grid, **depth) for grid in GRIDS]
            if self._fits(made[0], narrow=narrow):
                found |= {one.name: one for one in made}
        return found

    def _fits(self, config: Config, *, narrow: bool) -> bool:
        return all(self.shared_bytes(config, each) <= ROOM for each in self.head_dims) and all(
            self.registers(config, each, narrow=narrow) <= REGISTERS
            for each in self.head_dims
            if each <= 128
        )


def config(
    block_m: int,
    block_n: int,
    num_stages: int,
    num_warps: int | None = None,
    **options: int | str,
) -> Config:
    """A config of this family.

    num_warps: at head dims up to 128; None for what `Tiling.shape` chooses.
    options: swizzle, whose tiles are swizzled ("none", "q", "qk" or "qkv"; the others are padded);
    grid, which blocks come first ("tiles": all of a head; "heads": one of every head); depth, the
    columns of Q and K in an item, where they are sliced.
    """
    chosen = {"swizzle": "qkv", "grid": "tiles"} | options
    return Config(
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        options=tuple(chosen.items()),
    )


CONTRACT = Contract(
    lse="natural",
    empty_row_out=0.0,
    empty_row_lse=-math.inf,
    deterministic=True,
    masked_values="finite",
    batch_invariant=True,
)


def wide_scaling(scale: float) -> tuple[float, float]:
    """Q takes the scale's sign, so that the largest sum is the largest score; and 0."""
    if scale == 0:
        return 0.0, LOG2_E
    return math.copysign(1.0, scale), abs(scale) * LOG2_E


def narrow_scaling(scale: float) -> tuple[float, float]:
    """Q takes the scale."""
    return scale, LOG2_E


MASKS = ("full", "causal", "causal.tl", "window", "lengths", "documents", "prefix")
STORAGES = (STRIDED, "transposed")


SUPPORT = Support(
    dtypes=("float16", "bfloat16"),
    head_dims=HEAD_DIMS,
    masks=MASKS,
    intersections=True,
    grouped_heads=True,
    min_seqlen=0,
    layouts="aligned",
    devices=("cuda",),
    capability=(8, 0),
)
# A row's columns lie in four neighbouring lanes.
SOFTMAX = Softmax(
    scores="float32",
    exp="ex2.approx",
    maximum=Maximum(key_order="ascending"),
    row_sum=RowSum(lanes=4),
)


def variant(tiling: Tiling, configs: Sequence[Config], *, narrow: bool = False) -> Variant:
    """The variant of a tiling for 16-bit inputs; narrow: its products accumulate in fp16."""
    products = Products(
        operands="input",
        instruction="mma.sync",
        accumulator="float16" if narrow else "float32",
        prescale="q" if narrow else "none",
        promotion="block" if narrow else 0,
    )
    return _variant(
        f"ptx-{tiling.name.replace('_', '-')}{'-f16' if narrow else ''}",
        Numerics(
            products=products,
            softmax=SOFTMAX,
            output=Output(probability="input"),
            order=Order(head_dim="ascending"),  # `multiply_keys`, 16 columns for an MMA
        ),
        Family(
            configs=configs,
            support=replace(
                SUPPORT,
                dtypes=("float16",) if narrow else SUPPORT.dtypes,
                storages=STORAGES,
                head_dims=tiling.head_dims,
            ),
            make=lambda *choice: tiling.launch(*choice, narrow=narrow),
            kinds=KINDS,
            in_bytes=True,
            spill_budget=tiling.narrow_spills if narrow else tiling.spills,
            scaling=narrow_scaling if narrow else wide_scaling,
            further=lambda: tiling.product(narrow=narrow),
        ),
    )


def fp8_variant(tiling: Tiling, configs: Sequence[Config]) -> Variant:
    """The variant of a tiling for 8-bit inputs, whose O is in bfloat16."""
    numerics = Numerics(
        # Where a unit keeps fewer bits than fp32, every product of 32 terms begins at zero.
        products=Products(operands="input", instruction="mma.sync", promotion=32),
        # scale * log2(e) on the host, then the factors of q and k
        softmax=replace(SOFTMAX, scale_roundings=3),
        output=Output(probability="input", probability_scale=256.0, roundings=1),
    )
    family = Family(
        configs=configs,
        support=replace(
            SUPPORT,
            dtypes=("float8_e4m3fn", "float8_e5m2"),
            descalings=("none", "tensor", "head"),
            head_dims=tiling.head_dims,
            capability=(8, 9),
        ),
        make=lambda *choice: tiling.launch(*choice, narrow=False),
        kinds=KINDS,
        in_bytes=True,
        spill_budget=tiling.spills,
        matrix={"sm_89": "QMMA", "sm_120a": "QMMA"},  # elsewhere they are converted to fp16
    )
    return _variant(f"ptx-{tiling.name.replace('_', '-')}", numerics, family)


def _variant(name: str, numerics: Numerics, family: Family) -> Variant:
    return Variant(
        name=name,
        family="ptx",
        forward=family.forward,
        configs=family.configs,
        further_configs=lambda: [*family.further().values()],
        support=family.support,
        numerics=numerics,
        contract=CONTRACT,
        available=available,
        builds=family.builds,
        compilable=compilable,
        head_dim_buckets=tuple(family.support.head_dims),
    )
