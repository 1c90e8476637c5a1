"""The shipped kernel kernels/cute/flash_forward.cu with one line changed."""

from dataclasses import replace
from pathlib import Path

from kernels.cuda.family import Family, Launch
from kernels.cute import flash_forward
from tests.planted.patches import Patch
from verify.variant import Config, Support, Variant

SOURCE = Path(flash_forward.__file__).with_suffix(".cu")
CONFIG = flash_forward.CONFIGS[0]
SUPPORT = Support(
    dtypes=("float16",), head_dims=(64,), masks=("full",), layouts="contiguous", devices=("cuda",)
)
_STORED = "  copy(StorePairs{}, pairs.retile_S(rounded(acc)), pairs.partition_D(tile_q));\n"
_BARRIER = "  __syncthreads();\n"
_CAME = "    __syncthreads();  // V has come from all threads\n"
PATCHES = {
    "planted-cute-overrun": Patch(
        SOURCE,
        "if (get<1>(place(r, 0)) == 0 && row < a.seqlen_q) {",
        "if (get<1>(place(r, 0)) == 0 && row <= a.seqlen_q) {",
    ),
    "planted-cute-missing-barrier": Patch(SOURCE, _STORED + _BARRIER, _STORED),
    "planted-cute-early-copy-read": Patch(
        SOURCE, f"    cp_async_wait<1>();\n{_CAME}", f"    cp_async_wait<2>();\n{_CAME}"
    ),
}


def family_of(variant: str) -> Family:
    """The shipped kernel's family, of which every launch is that of the patched source."""

    def make(config: Config, dtype: str, head_dim: int, kind: str, storage: str) -> Launch:
        shipped = flash_forward.launch(config, dtype, head_dim, kind, storage)
        return replace(shipped, source=PATCHES[variant].source(variant, shipped.source))

    kinds = flash_forward.FAMILY.kinds
    return Family(configs=(CONFIG,), support=SUPPORT, make=make, kinds=kinds, in_bytes=False)


VARIANTS = [
    Variant(
        name=name,
        family="planted",
        forward=family_of(name).forward,
        configs=(CONFIG,),
        support=SUPPORT,
        numerics=flash_forward.VARIANT.numerics,
        available=flash_forward.available,
    )
    for name in PATCHES
]
