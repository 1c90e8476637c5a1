"""FlashAttention forward with log-sum-exp in CuTe for Hopper: copies by the tensor memory
accelerator, mbarriers and wgmma of sm_90a, as layouts say.

A block owns BLOCK_M = 128 query rows of one head and walks over the keys in blocks of BLOCK_N. One
warpgroup loads, two multiply, 64 rows each (Shah et al., arXiv 2407.08608, section 3.1, without its
overlap of softmax and products inside a warpgroup):

    producer              K(t), V(t) into slot t % STAGES, as soon as both consumers have read it
    consumer, per block   x     = (softmax_scale log2 e) (q . k)      one fp32 product per score
                          m'    = max(m, max x)
                          p     = 2^(x - m'),  alpha = 2^(m - m')     ex2.approx
                          l     = alpha l + sum p                     p in fp32, before its rounding
                          acc   = alpha acc + round(p) v              p rounded to v's dtype
    at the end            O = acc (1 / l),  LSE = ln 2 (m + log2 l)

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
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

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
from kernels.cute import flash_forward
from kernels.cute.flash_forward import ELEMENTS, cute_source
from kernels.masks import MaskBuild, mask_build, mask_tables
from verify.cuda.compile import LaunchError, Source, build_of, device_arch
from verify.cuda.compile import launch as launch_kernel
from verify.variant import (
    STRIDED,
    AttentionArgs,
    Build,
    Config,
    Unsupported,
    Workspace,
    arch_named,
)

HEAD_DIMS = (64, 128, 256)
WARPGROUPS = 3  # one producer, two consumers
ROOM = 227 * 1024  # bytes of shared memory that a block on Hopper can ask for
WIDEST = 128  # bytes of a box's row, which the swizzle is wide
MAP_BYTES = 128
MAP_ALIGNMENT = 64

Structure = TypeVar("Structure", bound=ctypes.Structure)


@dataclass(frozen=True)
class TensorMap:
    """What cuTensorMapEncodeTiled is told about a (batch, heads, seqlen, head_dim) tensor.

    dtype: one of `_TYPES`.  address: in bytes, a multiple of 16.
    dims: head_dim, seqlen, heads, batch.  strides: of seqlen, heads and batch, in bytes.
    box: columns, rows, 1, 1.
    """

    dtype: str
    address: int
    dims: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int, int]


def piece(head_dim: int, itemsize: int) -> int:
    """Columns of a box: as many as the widest swizzle has, or all."""
    return min(head_dim, WIDEST // itemsize)


def tensor_map(name: str, tensor: Tensor, rows: int, elsewhere: int = 0) -> TensorMap:
    """The map of q, k or v for tiles of that many rows.

    A dimension that repeats the same elements has size 1 in it, and the kernel asks for index 0.
    No map is empty: that of a tensor without rows has one, at the address `elsewhere`, and nothing
    asks for it.  Raises `Unsupported` if rows repeat.
    """
    _, _, seqlen, head_dim = tensor.shape
    if seqlen > 1 and tensor.stride(2) == 0:
        raise Unsupported(f"layout_{name}", "a tensor map cannot repeat a row: make it whole")
    sizes, strides = [], []
    for dim in (2, 1, 0):
        repeats = tensor.shape[dim] <= 1 or tensor.stride(dim) == 0
        sizes.append(1 if repeats else tensor.shape[dim])
        strides.append((head_dim if repeats else tensor.stride(dim)) * tensor.itemsize)
    return TensorMap(
        str(tensor.dtype).removeprefix("torch."),
        tensor.data_ptr() if tensor.numel() else elsewhere,
        (head_dim, *sizes),
        tuple(strides),
        (piece(head_dim, tensor.itemsize), rows, 1, 1),
    )


# CUtensorMapDataType, -Interleave, -Swizzle, -L2promotion and -FloatOOBfill in cuda.h; 8 bits go as
# bytes, and the swizzle is named by the bytes of a box's row.
_TYPES = {"float16": 6, "bfloat16": 9, "float8_e4m3fn": 0}
_NOT_INTERLEAVED = 0
_SWIZZLES = {64: 2, 128: 3}
_PROMOTE_256B = 3
_FILL_ZEROS = 0


def encode(made: TensorMap, to: int) -> None:
    """Write the 128 bytes of a map to the host address `to`, with the swizzle that its box is wide.
    Raises LaunchError."""
    if to % MAP_ALIGNMENT:
        raise LaunchError(f"a tensor map at {to:#x}: {MAP_ALIGNMENT} must divide its address")
    rank = len(made.dims)
    swizzle = _SWIZZLES[made.box[0] * getattr(torch, made.dtype).itemsize]
    status = _encoder()(
        ctypes.c_void_p(to),
        ctypes.c_int(_TYPES[made.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(made.address),
        (ctypes.c_uint64 * rank)(*made.dims),
        (ctypes.c_uint64 * (rank - 1))(*made.strides),
        (ctypes.c_uint32 * rank)(*made.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        *map(ctypes.c_int, (_NOT_INTERLEAVED, swizzle, _PROMOTE_256B, _FILL_ZEROS)),
    )
    if status:
        raise LaunchError(f"cuTensorMapEncodeTiled: {_words(status)} for {made}")


def _words(status: int) -> str:
    """The driver's name and text of an error."""
    from cuda.bindings import driver

    error = driver.CUresult(status)
    _, text = driver.cuGetErrorString(error)
    return f"{error.name}: {(text or b'').decode()}"


@cache
def _encoder() -> ctypes._CFuncPtr:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


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


def aligned(structure: type[Structure]) -> Structure:
    """An empty structure at an address that 64 divides."""
    memory = (ctypes.c_uint8 * (ctypes.sizeof(structure) + MAP_ALIGNMENT))()
    return structure.from_buffer(memory, -ctypes.addressof(memory) % MAP_ALIGNMENT)


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
        "ELEMENT": ELEMENTS[dtype],
        "HEAD_DIM": head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": room.stages,
        "QUERY_SLOTS": room.queries,
        "PERSISTENT": option(config, "persistent", head_dim),
        "OVERLAP": option(config, "overlap", head_dim),
    }
    return cute_source(Path(__file__).with_suffix(".cu"), "hopper_forward", defines)


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
    replace(BLOCKS[1], options=(("persistent", 1), ("overlap", 1))),
)


def further_configs() -> dict[str, Config]:
    """Every block with every option, by name."""
    options = ((), (("persistent", 1),), (("overlap", 1),), (("persistent", 1), ("overlap", 1)))
    made = [replace(block, options=chosen) for block in BLOCKS for chosen in options]
    return {config.name: config for config in made}


SUPPORT = replace(
    flash_forward.SUPPORT,
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
VARIANT = replace(
    flash_forward.VARIANT,
    name="cute-hopper-forward",
    forward=FAMILY.forward,
    configs=CONFIGS,
    support=SUPPORT,
    numerics=replace(
        flash_forward.VARIANT.numerics,
        products=replace(flash_forward.VARIANT.numerics.products, instruction="wgmma"),
    ),
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
