"""A tiny CUDA kernel, right and with one fault each (tiny.cu); some faults are in the memory that
it is given.  It computes no attention: only sanitizers are asked of it."""

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from verify.cuda.compile import Source, available, compile_source, device_arch, launch, load
from verify.variant import AttentionArgs, Support, Variant, Workspace

SUPPORT = Support(
    dtypes=("float32",), head_dims=(40,), masks=("full",), layouts="contiguous", devices=("cuda",)
)
# By variant: its FAULT in tiny.cu, or what is wrong with the memory of Q.
FAULTS = {
    "planted-correct": "NOTHING",
    "planted-overrun": "OVERRUN",
    "planted-overread": "OVERREAD",
    "planted-shared-overrun": "SHARED",
    "planted-misaligned-load": "MISALIGNED",
    "planted-missing-barrier": "BARRIER",
    "planted-early-copy-read": "COPY",
    "planted-missing-mbarrier-wait": "MBARRIER",
    "planted-divergent-barrier": "DIVERGENT",
    "planted-use-after-free": "freed",
    "planted-uninitialised-read": "unwritten",
    "planted-leak": "leaked",
    "planted-dirty-workspace": "HALVED",
    "planted-unwritten-shared": "UNWRITTEN",
}
_leaked: list[Tensor] = []


def source(variant: str) -> Source:
    """The build of that variant.  Its kernel's name is what a record of it names."""
    name, fault = variant.replace("-", "_"), FAULTS[variant]
    fault = fault if fault.isupper() else "NOTHING"
    return Source(Path(__file__).with_name("tiny.cu"), name, (("NAME", name), ("FAULT", fault)))


def memory(variant: str, q: Tensor, workspace: Workspace) -> tuple[int, Tensor]:
    """The address that the variant reads as Q, and the tensor that must live until it has."""
    match FAULTS[variant]:
        case "freed":  # at once: a sanitized process has no cache of allocations
            return torch.empty_like(q).data_ptr(), q
        case "unwritten":
            empty = torch.empty_like(q)
            return empty.data_ptr(), empty
        case "HALVED":
            return workspace["scratch"].data_ptr(), workspace["scratch"]
        case "leaked":
            _leaked.append(q.clone())
    return q.data_ptr(), q


def forward(
    variant: str, args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace
) -> None:
    """The entry point of that variant."""
    SUPPORT.check(args, out)
    assert lse is not None
    with torch.cuda.device_of(out):
        kernel = load(compile_source(source(variant), device_arch(out.device)))
        blocks = out.numel() // 128 + 1  # the last one has a thread behind the last element
        sizes = (ctypes.c_int(out.numel()), ctypes.c_int(lse.numel()))
        address, _held = memory(variant, args.q, workspace)
        launch(kernel, (blocks,), (128,), 0, address, out.data_ptr(), lse.data_ptr(), *sizes)


def scratch(args: AttentionArgs) -> dict[str, tuple[tuple[int, ...], str]]:
    """The workspace of a variant that reads it: as large as Q."""
    return {"scratch": (tuple(args.q.shape), "float32")}


def forward_of(variant: str) -> Callable[[AttentionArgs, Tensor, Tensor | None, Workspace], None]:
    """The entry point of that variant, without its name."""
    return partial(forward, variant)


VARIANTS = [
    Variant(
        name=name,
        family="planted",
        forward=forward_of(name),
        workspace=scratch if fault == "HALVED" else None,
        support=SUPPORT,
        available=available,
    )
    for name, fault in FAULTS.items()
]
