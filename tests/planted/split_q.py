"""The shipped kernel kernels/ptx/split_q.cu with one line of its template changed.

One stage: there a missing barrier leaves reads and writes of the same bytes side by side, which
with two stages are a whole block of keys apart.
"""

from dataclasses import replace
from pathlib import Path

from kernels.cuda.family import Family, Launch
from kernels.ptx import split_q
from kernels.ptx.tiling import KINDS
from tests.planted.patches import Patch
from verify.cuda.compile import available
from verify.variant import Config, Support, Variant

FOLDER = Path(split_q.__file__).parent
TEMPLATE = FOLDER / "flash.cuh"
PIPELINE = FOLDER / "pipeline.cuh"
CONFIG = next(config for config in split_q.CONFIGS if config.num_stages == 1)
SUPPORT = Support(
    dtypes=("float16",), head_dims=(64,), masks=("full",), layouts="contiguous", devices=("cuda",)
)


PATCHES = {
    "planted-split-q-overrun": Patch(
        TEMPLATE,
        "if (row < a.seqlen_q && n < out_tiles) {",
        "if (row <= a.seqlen_q && n < out_tiles) {",
    ),
    "planted-split-q-missing-barrier": Patch(
        PIPELINE,
        "__syncthreads();  // item: all copies have landed, and",
        "// item: all copies have landed, and",
    ),
    "planted-split-q-early-copy-read": Patch(
        PIPELINE,
        "ptx::cp_async_wait_group<ahead - 1>();",
        "ptx::cp_async_wait_group<ahead>();",
    ),
}


def family_of(variant: str) -> Family:
    """The shipped kernel's family, of which every launch is that of the patched source."""

    def make(config: Config, dtype: str, head_dim: int, kind: str, storage: str) -> Launch:
        shipped = split_q.TILING.launch(config, dtype, head_dim, kind, storage, narrow=False)
        return replace(shipped, source=PATCHES[variant].source(variant, shipped.source))

    return Family(configs=(CONFIG,), support=SUPPORT, make=make, kinds=KINDS, in_bytes=True)


VARIANTS = [
    Variant(
        name=name,
        family="planted",
        forward=family_of(name).forward,
        configs=(CONFIG,),
        support=SUPPORT,
        numerics=split_q.VARIANT.numerics,
        available=available,
    )
    for name in PATCHES
]
