"""FlashAttention forward with log-sum-exp in CuTe for Hopper: copies by the tensor memory
accelerator, mbarriers and wgmma of sm_90a, as layouts say.

A block owns BLOCK_M = 128 query rows of one head and walks over the keys in blocks of BLOCK_N. One
warpgroup loads, two multiply, 64 rows each (Shah et al., arXiv 2407.08608, section 3.1):

    producer              K(t), V(t) into slot t % STAGES, as soon as both consumers have read it
    consumer, per block   x     = (softmax_scale log2 e) (q . k)      one fp32 product per score
                          m'    = max(m, max x)
                          p     = 2^(x - m'),  alpha = 2^(m - m')     ex2.approx
                          l     = alpha l + sum p                     p in fp32, before its rounding
                          acc   = alpha acc + round(p) v              p rounded to v's dtype
    at the end            O = acc (1 / l),  LSE = ln 2 (m + log2 l)

**Options** of a config, up to head dim 128; neither changes a bit of O or LSE:

- `overlap`: the scores of block t + 1 are a product before P(t) V(t) is, and their softmax is done
  while the latter goes on (section 3.2 there).  A consumer holds both P(t) and the next scores.
- `persistent`: as many programs as multiprocessors; each owns one tile of rows after the other.
  The rings go on from tile to tile, so that Q and the first keys of the next are copied while the
  consumers end the one before.  O leaves through the slot of its Q; a second slot takes the next.

**Masks** are arguments, never builds: a band between two diagonals, or a table of the keys
[low, high) of every row.  A block of keys that no row of the tile sees is not loaded; one that
every row sees whole needs no comparison.  Keys past the end come as zeros from the accelerator. Of
the other keys that no row of the tile sees, the consumers overwrite V with zeros: P is 0 there, and
0 * NaN would be NaN.

**Atoms and layouts** (CuTe's concepts: CUTLASS 4.2, media/docs/cpp/cute).

- Q, K and V lie in shared memory in pieces of 64 columns, `GMMA::Layout_K_SW128_Atom`: chunk c (16
  bytes) of row r lies at place c ^ (r % 8). A tensor map with boxes of 64 columns and
  SWIZZLE_128B writes what the descriptors of wgmma read.
- S = Q K^T: both operands in shared memory, K-major. V is the right operand of P V at the same
  places under `GMMA::Layout_MN_SW128_Atom`.
- P stays in registers: an accumulator of S, rounded, is register for register the left operand.
- Which row and key a register holds is asked of an identity tensor, partitioned as S is.

**Tensor maps** have four dimensions, (head_dim, seqlen, heads, batch), so that a tile never reaches
into the next head.  cuTensorMapEncodeTiled makes them at the launch, in the structure of arguments,
a `__grid_constant__` parameter.  It is called through ctypes: it wants an address that 64 divides,
and the objects of cuda.bindings lie at multiples of 16.

docs/cute.md shows the pipeline.  A build is chosen by dtype, head dim and config.  The ring has one
slot where two do not fit: blocks of 128 keys at head dim 256.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.cuda.family import Arguments as Common
from kernels.cuda.family import (
    Choice,
    Family,
    Launch,
    check_config,
    check_room,
    loaded,
)
from kernels.cute import family
from kernels.cute.hopper_maps import MAP_ALIGNMENT, MAP_BYTES, aligned, encode, tensor_map
from kernels.masks import MaskBuild, mask_build, mask_tables
from verify.cuda.compile import Source, build_of, device_arch
from verify.cuda.compile import launch as launch_kernel
from verify.variant import (
    STRIDED,
    AttentionArgs,
    Build,
    Config,
    Variant,
    Workspace,
    arch_named,
)

HEAD_DIMS = (64, 128, 256)
WARPGROUPS = 3  # one producer, two consumers
ROOM = 227 * 1024  # bytes of shared memory that a block on Hopper can ask for


def fields(*further: tuple[str, type[ctypes.c_int32]]) -> list[tuple[str, Any]]:
    """Of a structure of arguments: the common ones, further ones of 4 bytes, and three tensor maps
    that begin where 64 divides the offset."""
    size = ctypes.sizeof(Common) + 4 * len(further)
    return [
        ("common", Common),
        *further,
        ("padding", ctypes.c_uint8 * (-size % MAP_ALIGNMENT)),
        *((f"map_{name}", ctypes.c_uint8 * MAP_BYTES) for name in "qkv"),
    ]


class Arguments(ctypes.Structure):
    """One problem, as hopper_forward.cu declares it.

    tiles: of rows, of all heads.  by_length: whether persistent programs take the last tile of
    every head first.
    """

    _fields_ = fields(("tiles", ctypes.c_int32), ("by_length", ctypes.c_int32))


@dataclass(frozen=True, kw_only=True)
class Hopper(Family):
    """The builds, whose arguments hold tensor maps.

    structure: the arguments, made of `fields`.  expects: words that a build's instructions hold.
    persists: whether there are builds whose programs are persistent.
    """

    structure: type[ctypes.Structure]
    expects: tuple[str, ...]
    persists: bool = False

    def forward(
        self, args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace
    ) -> None:
        """Write O to `out` and the natural-log LSE to `lse`; raises `Unsupported` as `Family`'s
        does.  Persistent programs are as many as the device has multiprocessors, or tiles."""
        if not option(args.config, "persistent", args.head_dim):
            super().forward(args, out, lse, workspace)
            return
        self.support.check(args, out)
        check_config(args, self.configs, self.further)
        if args.seqlen_q == 0:
            return
        assert lse is not None
        mask = mask_build(args)
        tables = mask_tables(args, mask)  # referenced until the launch has been queued
        made = self.make(args.config, args.dtype, args.head_dim, self.kinds[mask.kind], STRIDED)
        check_room(args, made)
        arguments = self.arguments(args, out, lse, mask, tables)
        device = args.q.device
        programs = torch.cuda.get_device_properties(device).multi_processor_count
        with torch.cuda.device_of(args.q):
            kernel = loaded(made.source, device_arch(device))
            grid = min(programs, tiles(args))
            launch_kernel(kernel, (grid,), (made.threads,), made.shared_bytes, arguments)

    def arguments(
        self,
        args: AttentionArgs,
        out: Tensor,
        lse: Tensor,
        mask: MaskBuild,
        tables: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Any:
        """The structure that a launch passes; the tensors must outlive the launch."""
        config = args.config
        assert config.block_m is not None
        assert config.block_n is not None
        made = aligned(self.structure)
        made.common = super().arguments(args, out, lse, mask, tables)
        if self.persists:
            made.tiles = tiles(args)
            made.by_length = mask.kind == "causal"
        maps = {
            "q": tensor_map("q", args.q, config.block_m),
            "k": tensor_map("k", args.k, config.block_n, out.data_ptr()),
            "v": tensor_map("v", args.v, config.block_n, out.data_ptr()),
        }
        for name, one in maps.items():
            encode(one, ctypes.addressof(made) + getattr(self.structure, f"map_{name}").offset)
        return made

    def build(self, choice: Choice, arch: str) -> Build:
        """One build for that architecture."""
        config, dtype, head_dim, _, _ = choice
        made = self.make(*choice)
        return build_of(
            f"{config.name}-{dtype}-d{head_dim}",
            made.source,
            arch,
            shared=made.shared_bytes,
            expects=self.expects,
        )


def option(config: Config, name: str, head_dim: int) -> int:
    """Whether a build has that option: 1, or 0.  Above head dim 128, where registers do not hold
    what persistent programs keep, none has."""
    return int(dict(config.options).get(name, 0)) if head_dim <= 128 else 0


def tiles(args: AttentionArgs) -> int:
    """Tiles of rows, of all heads."""
    assert args.config.block_m is not None
    return args.batch * args.heads_q * math.ceil(args.seqlen_q / args.config.block_m)


def slots(config: Config, bytes_of: Callable[[int], int]) -> int:
    """Of the rings: as many as the config says, or as a block's shared memory holds.

    bytes_of: the shared memory of a block with so many slots.
    """
    assert config.num_stages is not None
    fitting = (n for n in range(config.num_stages, 1, -1) if bytes_of(n) <= ROOM)
    return next(fitting, 1)


def _bytes(config: Config, head_dim: int, slots: int, queries: int = 1) -> int:
    """A tile of Q for each of its slots, one of K and of V per slot of theirs, and the barriers, up
    to the alignment of the whole."""
    assert config.block_m is not None
    assert config.block_n is not None
    tiles = 2 * head_dim * (queries * config.block_m + 2 * slots * config.block_n)
    return tiles + 1024 * math.ceil(8 * (2 * queries + 4 * slots) / 1024)


@dataclass(frozen=True)
class Room:
    """What the shared memory of a block holds.

    stages: slots of the rings of K and V.  queries: of the ring of Q, two where programs are
    persistent and they fit beside the others.
    """

    stages: int
    queries: int
    bytes: int

    @staticmethod
    def of(config: Config, head_dim: int) -> Room:
        """Of a build."""
        stages = slots(config, partial(_bytes, config, head_dim))
        two = _bytes(config, head_dim, stages, 2)
        if option(config, "persistent", head_dim) and two <= ROOM:
            return Room(stages, 2, two)
        return Room(stages, 1, _bytes(config, head_dim, stages))


def source(config: Config, dtype: str, head_dim: int) -> Source:
    """One build of hopper_forward.cu; raises CompileError where headers are missing."""
    room = Room.of(config, head_dim)
    defines = {
        "ELEMENT": family.ELEMENTS[dtype],
        "HEAD_DIM": head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": room.stages,
        "QUERY_SLOTS": room.queries,
        "PERSISTENT": option(config, "persistent", head_dim),
        "OVERLAP": option(config, "overlap", head_dim),
    }
    return family.cute_source(Path(__file__).with_suffix(".cu"), "hopper_forward", defines)


def launch(config: Config, dtype: str, head_dim: int, kind: str, storage: str = STRIDED) -> Launch:
    """How a build is compiled and launched."""
    assert config.block_m is not None
    made = source(config, dtype, head_dim)
    return Launch(made, config.block_m, 128 * WARPGROUPS, Room.of(config, head_dim).bytes)


def builds(arch: str) -> list[Build]:
    """Every config, both dtypes and every head dim; for Hopper alone, whose instructions no other
    generation has."""
    if arch_named(arch).capability != SUPPORT.capability:
        return []
    small, large, *further = CONFIGS
    chosen = [(large, "float16", 128), (small, "bfloat16", 256), (large, "bfloat16", 64)]
    chosen.append((large, "float16", 256))  # one slot
    chosen += [(config, "bfloat16", head_dim) for config in further for head_dim in (64, 128)]
    return [FAMILY.build((*choice, "", STRIDED), arch) for choice in chosen]


BLOCKS = (
    Config(block_m=128, block_n=64, num_warps=4 * WARPGROUPS, num_stages=2),
    Config(block_m=128, block_n=128, num_warps=4 * WARPGROUPS, num_stages=2),
)
CONFIGS = (
    *BLOCKS,
    replace(BLOCKS[1], options=(("persistent", 1),)),
    replace(BLOCKS[1], options=(("overlap", 1),)),
)


def further_configs() -> dict[str, Config]:
    """Every block with every option, by name."""
    options = ((), (("persistent", 1),), (("overlap", 1),), (("persistent", 1), ("overlap", 1)))
    made = [replace(block, options=chosen) for block in BLOCKS for chosen in options]
    return {config.name: config for config in made}


SUPPORT = replace(
    family.SUPPORT,
    head_dims=HEAD_DIMS,
    capability=(9, 0),
    max_capability=(9, 0),
)

FAMILY = Hopper(
    configs=CONFIGS,
    support=SUPPORT,
    make=launch,
    kinds=dict.fromkeys(("full", "causal", "window", "interval"), ""),  # one build for all
    in_bytes=False,
    structure=Arguments,
    expects=("HGMMA", "UTMALDG"),
    persists=True,
    further=further_configs,
)

# Its arithmetic and its promises are those of the forward for every architecture, but for the unit.
VARIANT = Variant(
    name="cute-hopper-forward",
    family="cute",
    forward=FAMILY.forward,
    configs=CONFIGS,
    support=SUPPORT,
    numerics=replace(
        family.NUMERICS, products=replace(family.NUMERICS.products, instruction="wgmma")
    ),
    contract=family.CONTRACT,
    available=family.available,
    compilable=family.compilable,
    builds=builds,
    head_dim_buckets=HEAD_DIMS,
)

WITNESS = (
    {
        "case": (
            "cute-hopper-forward:m128n64w12s2:accuracy:b=2,hq=16,hkv=2,sq=31,skv=31,d=128,"
            "dtype=float16,mask=window.200.65,scale=0.75,lq=sbhd,lk=sbhd,lv=sbhd,lo=sbhd,ldo=sbhd,"
            "dist=low_rank,seed=455624651"
        ),
        "tensor": "out",
        "r": 0.997,
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-22",
    },
)
