"""A tiny CUDA kernel that is launched on its tensors' device, and one that is launched on whatever
device is current.  Neither computes attention: only bits are asked of them."""

import contextlib
import ctypes
from functools import partial
from pathlib import Path

import torch

from verify.cuda.compile import Source, available, compile_source, device_arch, launch, load
from verify.variant import Support, Variant

SUPPORT = Support(
    dtypes=("float32",), head_dims=(40,), masks=("full",), layouts="contiguous", devices=("cuda",)
)
SOURCE = Source(
    Path(__file__).with_name("tiny.cu"), "tiny", (("NAME", "tiny"), ("FAULT", "NOTHING"))
)


def forward(guarded, args, out, lse, workspace):
    """The entry point; `guarded`: with the tensors' device current."""
    SUPPORT.check(args, out)
    with torch.cuda.device_of(out) if guarded else contextlib.nullcontext():
        kernel = load(compile_source(SOURCE, device_arch(out.device)))
        sizes = (ctypes.c_int(out.numel()), ctypes.c_int(lse.numel()))
        addresses = (args.q.data_ptr(), out.data_ptr(), lse.data_ptr())
        launch(kernel, (out.numel() // 128 + 1,), (128,), 0, *addresses, *sizes)


VARIANTS = [
    Variant(
        name=name,
        family="planted",
        forward=partial(forward, name == "guarded"),
        support=SUPPORT,
        available=available,
    )
    for name in ("guarded", "unguarded")
]
