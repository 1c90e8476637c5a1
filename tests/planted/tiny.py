"""A tiny CUDA kernel, right and with one fault each (tiny.cu).  It computes no attention: only
sanitizers are asked of it."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from verify.cuda.compile import Source, available, compile_source, device_arch, launch, load
from verify.variant import AttentionArgs, Support, Variant, Workspace

SUPPORT = Support(
    dtypes=("float32",), head_dims=(40,), masks=("full",), layouts="contiguous", devices=("cuda",)
)
# By variant: its kernel's name, which is what a record of it names, and its FAULT.
FAULTS = {
    "planted-correct": ("planted_correct", "NOTHING"),
    "planted-overrun": ("planted_overrun", "OVERRUN"),
    "planted-overread": ("planted_overread", "OVERREAD"),
    "planted-missing-barrier": ("planted_missing_barrier", "BARRIER"),
}


def source(variant: str) -> Source:
    """The build of that variant."""
    name, fault = FAULTS[variant]
    return Source(Path(__file__).with_name("tiny.cu"), name, (("NAME", name), ("FAULT", fault)))


def forward_of(variant: str) -> Callable[[AttentionArgs, Tensor, Tensor | None, Workspace], None]:
    """The entry point of that variant."""

    def forward(args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace) -> None:
        SUPPORT.check(args, out)
        assert lse is not None
        with torch.cuda.device_of(out):
            kernel = load(compile_source(source(variant), device_arch(out.device)))
            blocks = out.numel() // 128 + 1  # the last one has a thread behind the last element
            sizes = (ctypes.c_int(out.numel()), ctypes.c_int(lse.numel()))
            launch(
                kernel,
                (blocks,),
                (128,),
                0,
                args.q.data_ptr(),
                out.data_ptr(),
                lse.data_ptr(),
                *sizes,
            )

    return forward


VARIANTS = [
    Variant(
        name=name, family="planted", forward=forward_of(name), support=SUPPORT, available=available
    )
    for name in FAULTS
]
