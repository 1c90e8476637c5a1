"""A kernel whose ldmatrix meets bank conflicts, and the same without: conflicts.cu with rows of 128
and of 144 bytes.  It computes no attention: only ncu is asked of it."""

from pathlib import Path

import torch
from torch import Tensor

from verify.cuda.compile import Source, available, compile_source, device_arch, launch, load
from verify.variant import AttentionArgs, Config, Support, Variant, Workspace

SUPPORT = Support(
    dtypes=("float16",), head_dims=(64,), masks=("full",), layouts="contiguous", devices=("cuda",)
)
PITCHES = (128, 144)


def source(pitch: int) -> Source:
    """The build for rows of that many bytes."""
    macros = (("PITCH", str(pitch)),)
    return Source(Path(__file__).with_name("conflicts.cu"), "matrices", macros)


def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
    """Launch the kernel, which writes the first 512 bytes of `out`."""
    SUPPORT.check(args, out)
    pitch = int(dict(args.config.options)["pitch"])
    with torch.cuda.device_of(out):
        kernel = load(compile_source(source(pitch), device_arch(out.device)))
        launch(kernel, (1,), (32,), 0, out.data_ptr())


VARIANT = Variant(
    name="conflicts",
    family="planted",
    forward=forward,
    configs=tuple(Config(options=(("pitch", pitch),)) for pitch in PITCHES),
    support=SUPPORT,
    available=available,
)
