"""The shipped kernel kernels/ptx/split_q.cu with one line of its template changed: what a slip of
the hand would have made of it.

A patch names a text that must occur exactly once in the shipped template; the patched kernel is
compiled and launched by the shipped kernel's own machinery.  One stage: there a missing barrier
leaves reads and writes of the same bytes side by side, which with two stages are a whole block of
keys apart.
"""

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.cuda.family import Family, Launch
from kernels.ptx import split_q
from kernels.ptx.tiling import KINDS
from verify.cuda.compile import Source, available, cache_directory
from verify.variant import Config, Support, Variant

FOLDER = Path(split_q.__file__).parent
TEMPLATE = FOLDER / "flash.cuh"
PIPELINE = FOLDER / "pipeline.cuh"
CONFIG = next(config for config in split_q.CONFIGS if config.num_stages == 1)
SUPPORT = Support(
    dtypes=("float16",), head_dims=(64,), masks=("full",), layouts="contiguous", devices=("cuda",)
)


@dataclass(frozen=True)
class Patch:
    """`before`, which occurs exactly once in the shipped file, becomes `after`."""

    shipped: Path
    before: str
    after: str

    def apply(self, text: str) -> str:
        """The patched text; raises ValueError if `before` does not occur exactly once."""
        if text.count(self.before) != 1:
            raise ValueError(
                f"{self.before!r} occurs {text.count(self.before)} times in {self.shipped.name}"
            )
        return text.replace(self.before, self.after)


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


def patched(variant: str, shipped: Source) -> Source:
    """The shipped source beside a template of which one file is patched, on disk."""
    patch = PATCHES[variant]
    folder = cache_directory() / variant
    folder.mkdir(parents=True, exist_ok=True)
    files = (shipped.path, TEMPLATE, PIPELINE)
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    texts[patch.shipped.name] = patch.apply(texts[patch.shipped.name])
    for name, text in texts.items():
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, folder / name)
    return replace(shipped, path=folder / shipped.path.name, includes=(FOLDER,))


def family_of(variant: str) -> Family:
    """The shipped kernel's family, of which every launch is that of the patched source."""

    def make(config: Config, dtype: str, head_dim: int, kind: str, storage: str) -> Launch:
        shipped = split_q.TILING.launch(config, dtype, head_dim, kind, storage, narrow=False)
        return replace(shipped, source=patched(variant, shipped.source))

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
