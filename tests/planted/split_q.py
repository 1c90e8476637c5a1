"""The shipped kernel kernels/ptx/split_q.cu with one line changed: what a slip of the hand would
have made of it.

A patch names a text that must occur exactly once in the shipped source; the patched source is
compiled and launched by the shipped kernel's own machinery.  One stage: there a missing barrier
leaves reads and writes of the same bytes side by side, which with two stages are a whole block of
keys apart.
"""

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.family import Arguments
from kernels.ptx import split_q
from verify.cuda.compile import (
    available,
    cache_directory,
    compile_source,
    device_arch,
    launch,
    load,
)
from verify.variant import AttentionArgs, Support, Variant, Workspace

SHIPPED = Path(split_q.__file__).with_name("split_q.cu")
CONFIG = next(config for config in split_q.CONFIGS if config.num_stages == 1)
SUPPORT = Support(
    dtypes=("float16",), head_dims=(64,), masks=("full",), layouts="contiguous", devices=("cuda",)
)


@dataclass(frozen=True)
class Patch:
    """`before`, which occurs exactly once in the shipped source, becomes `after`."""

    before: str
    after: str

    def apply(self, text: str) -> str:
        """The patched text; raises ValueError if `before` does not occur exactly once."""
        if text.count(self.before) != 1:
            raise ValueError(
                f"{self.before!r} occurs {text.count(self.before)} times in {SHIPPED.name}"
            )
        return text.replace(self.before, self.after)


PATCHES = {
    "planted-split-q-overrun": Patch("if (r < a.seqlen_q) {", "if (r <= a.seqlen_q) {"),
    "planted-split-q-missing-barrier": Patch("__syncthreads();  // V:", "// V:"),
}


def patched(variant: str) -> Path:
    """The patched source on disk."""
    text = PATCHES[variant].apply(SHIPPED.read_text(encoding="utf-8"))
    folder = cache_directory() / "planted"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
        file.write(text)
    path = folder / f"{variant}.cu"
    os.replace(file.name, path)
    return path


def forward_of(variant: str) -> Callable[[AttentionArgs, Tensor, Tensor | None, Workspace], None]:
    """The entry point of that variant."""

    def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
        SUPPORT.check(args, out)
        assert lse is not None
        grid = args.batch * args.heads_q * math.ceil(args.seqlen_q / split_q.BLOCK_M)
        source = replace(
            split_q.source(args.config, args.dtype, args.head_dim, False), path=patched(variant)
        )
        with torch.cuda.device_of(args.q):
            kernel = load(compile_source(source, device_arch(args.q.device)))
            shared = split_q.shared_bytes(args.config, args.head_dim)
            launch(
                kernel,
                (grid,),
                (32 * split_q.WARPS,),
                shared,
                Arguments.of(args, out, lse, in_bytes=True),
            )

    return forward


VARIANTS = [
    Variant(
        name=name,
        family="planted",
        forward=forward_of(name),
        configs=(CONFIG,),
        support=SUPPORT,
        numerics=split_q.VARIANT.numerics,
        available=available,
    )
    for name in PATCHES
]
