"""How the kernels of the CuTe backward are compiled and launched: flash_backward.cu has the walks,
row_sums.cu the sums of rows.

A walk owns 64 keys (or rows) and has fp32 sums of 64 x head_dim in registers: one of dK and one of
dV, or one alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernels.cuda.family import Launch
from kernels.cute.family import ELEMENTS, STAGES, WARPS, cute_source
from verify.cuda.compile import Source
from verify.variant import Config

WIDE = 128  # above this head dim dV and dK have walks of their own
WIDE_STEP = 32  # rows of a step there
ROOM = 99 * 1024  # bytes of shared memory that a block of every architecture can have
DELTA_ROWS = 32  # of a block of row_sums.cu


@dataclass(frozen=True)
class Walk:
    """A kernel of flash_backward.cu, by the name of its entry point.

    keys: whether a block owns keys and walks over rows, or else the reverse.
    sum_x, sum_y: whether it makes dK (dQ if rows are owned), and dV.
    atomic: whether it adds to dQ in memory, too.
    """

    name: str
    keys: bool = True
    sum_x: bool = True
    sum_y: bool = True
    atomic: bool = False


ROWS = Walk("query_gradients", keys=False, sum_y=False)
KEYS = Walk("key_value_gradients")
KEYS_ATOMIC = Walk("all_gradients", atomic=True)
# Above `WIDE`:
VALUES_ALONE = Walk("value_gradients", sum_x=False)
KEYS_ALONE = Walk("key_gradients", sum_y=False)
KEYS_ALONE_ATOMIC = Walk("key_query_gradients", sum_y=False, atomic=True)


def sums_launch(dtype: str, head_dim: int) -> Launch:
    """How the sums delta are compiled and launched."""
    defines = ("FORMAT", dtype), ("HEAD_DIM", str(head_dim))
    source = Source(Path(__file__).with_name("row_sums.cu"), "row_sums", defines=defines)
    return Launch(source, DELTA_ROWS, 32 * WARPS, 0)


def walk_launch(walk: Walk, config: Config, dtype: str, head_dim: int) -> Launch:
    """How a walk is compiled and launched; `Launch.block_m` is the rows, or keys, of a tile.

    Raises CompileError where CuTe's headers are missing.
    """
    owned, walked = config.block_n, step_of(config, head_dim)
    assert owned is not None
    stages = stages_of(walk, config, head_dim)
    shared_bytes = walk_bytes(walk, config, head_dim, stages)
    defines = {
        "ELEMENT": ELEMENTS[dtype],
        "HEAD_DIM": head_dim,
        "OWNED": owned,
        "WALKED": walked,
        "STAGES": stages,
        "KEYS": int(walk.keys),
        "SUM_X": int(walk.sum_x),
        "SUM_Y": int(walk.sum_y),
        "ATOMIC": int(walk.atomic),
        "WALK": walk.name,
        "SHARED_BYTES": shared_bytes,
    }
    source = cute_source(Path(__file__).with_name("flash_backward.cu"), walk.name, defines)
    return Launch(source, owned, 32 * WARPS, shared_bytes)


def step_of(config: Config, head_dim: int) -> int:
    """Rows of a step."""
    assert config.block_m is not None
    return min(config.block_m, WIDE_STEP) if head_dim > WIDE else config.block_m


def stages_of(walk: Walk, config: Config, head_dim: int) -> int:
    """Of the pipeline: two where they fit every architecture, else one."""
    return STAGES if walk_bytes(walk, config, head_dim, STAGES) <= ROOM else 1


def walk_bytes(walk: Walk, config: Config, head_dim: int, stages: int) -> int:
    """Shared memory of a block, as `Shared` of flash_backward.cu has it."""
    owned, walked = config.block_n, step_of(config, head_dim)
    assert owned is not None
    x = head_dim * owned
    y = head_dim * owned if walk.sum_x else 64
    steps = 2 * stages * head_dim * walked
    pairs = owned * walked if walk.atomic and stages > 1 else 64
    return 2 * (x + y + steps + pairs) + 8 * stages * walked  # with LSE and delta of each stage
