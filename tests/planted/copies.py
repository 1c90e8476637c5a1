"""A known-bad copy of every CUDA variant for each slip of the hand: one barrier removed, one wait
for copies off by one, one tail predicate too wide.

The shipped text is edited when a copy is built; the shipped kernel's own machinery compiles and
launches it.  A copy's config has one slot more than the item that is read: there a missing barrier
leaves reads and writes of the same bytes side by side.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kernels.cuda.family import Family, Launch
from kernels.cute import flash_backward, flash_forward, hopper_forward, hopper_fp8_forward
from kernels.ptx import (
    share_kv,
    share_qkv,
    split_kv,
    split_q,
    split_q_fp8,
    tiling_qk,
    tiling_qkv,
)
from kernels.ptx.tiling import Tiling
from tests.planted.here import unavailable
from verify.cuda.edits import Edit, edited
from verify.variant import Config, Support, Variant

PTX_SLIPS = {
    "overrun": Edit(r"row < a\.seqlen_q && n < out_tiles\)", "row <= a.seqlen_q && n < out_tiles)"),
    "missing-barrier": Edit(r"__syncthreads\(\);(?=  // item: all copies have landed, and)", ""),
    "early-copy-read": Edit(r"cp_async_wait_group<ahead - 1>\(\)", "cp_async_wait_group<ahead>()"),
}
CUTE_SLIPS = {
    "overrun": Edit(
        r"get<1>\(place\(r, 0\)\) == 0 && row < a\.seqlen_q\)",
        "get<1>(place(r, 0)) == 0 && row <= a.seqlen_q)",
    ),
    "missing-barrier": Edit(r"(copy\(StorePairs\{\}, [^\n]*\n)  __syncthreads\(\);\n", r"\1"),
    "early-copy-read": Edit(
        r"cp_async_wait<1>\(\);(?=\n    __syncthreads\(\);  // V has come)", "cp_async_wait<2>();"
    ),
}

HOPPER_SLIPS = {
    "overrun": CUTE_SLIPS["overrun"],
    "missing-barrier": Edit(
        r"  cutlass::arch::NamedBarrier::sync\(kGroup, kBarrierGroup \+ warpgroup\);\n", ""
    ),
    "early-copy-read": Edit(
        r"    wait_barrier\(shared\.v_here\[turn\.slot\], turn\.parity\);\n", ""
    ),
}
HOPPER_FP8_SLIPS = {
    "overrun": CUTE_SLIPS["overrun"],
    "missing-barrier": Edit(
        r"    wait_barrier\(shared\.vt_here\[turn\.slot\], turn\.parity\);\n", ""
    ),
    "early-copy-read": HOPPER_SLIPS["early-copy-read"],
}
CUTE_BACKWARD_SLIPS = {
    "overrun": Edit(r"if \(row < end\)", "if (row <= end)"),
    "missing-barrier": Edit(r"  __syncthreads\(\);(?=  // the gradients have come)", ""),
    "early-copy-read": Edit(
        r"cp_async_wait<0>\(\);(?=\n    __syncthreads\(\);  // the step has)", "cp_async_wait<1>();"
    ),
}


def slipped(slip: Edit, make: Callable[..., Launch], *choice: object) -> Launch:
    """The launch of a choice, of the edited source."""
    shipped = make(*choice)
    return replace(shipped, source=edited(shipped.source, [slip]))


def config_of(variant: Variant, tiling: Tiling | None) -> Config:
    """The first config with the fewest slots in which items travel ahead."""
    if tiling is None:
        return variant.configs[0]
    ahead = [c for c in variant.configs if tiling.slots * (c.num_stages or 0) > 1]
    return min(ahead, key=lambda config: config.num_stages or 0)


def copies_of(shipped: Variant, tiling: Tiling | None) -> list[Variant]:
    """The copies of a variant, one for each slip; without a tiling, of a CuTe kernel."""
    config = config_of(shipped, tiling)
    support = Support(
        dtypes=shipped.support.dtypes[:1],
        head_dims=(64,),
        masks=("full",),
        layouts="contiguous",
        devices=("cuda",),
        capability=shipped.support.capability,
        max_capability=shipped.support.max_capability,
    )
    slips = slips_of(shipped, tiling)
    # The arguments that the two kinds of entry points take.
    entry = "forward" if shipped.forward else "backward"
    family: Family | flash_backward.Walks = getattr(shipped, entry).__self__
    found = []
    for slip, edit in slips.items():
        make = partial(slipped, edit, family.make)
        copy = replace(family, configs=(config,), support=support, make=make)
        found.append(
            replace(
                shipped,
                name=f"planted-{short(shipped.name)}-{slip}",
                family="planted",
                configs=(config,),
                further_configs=None,
                support=support,
                builds=None,
                compilable=None,
                available=partial(unavailable, shipped),
                **{entry: getattr(copy, entry)},
            )
        )
    return found


def slips_of(shipped: Variant, tiling: Tiling | None) -> dict[str, Edit]:
    """The edits of a variant's source, by slip."""
    if tiling is not None:
        return PTX_SLIPS
    if shipped is hopper_forward.VARIANT:
        return HOPPER_SLIPS
    if shipped in hopper_fp8_forward.VARIANTS:
        return HOPPER_FP8_SLIPS
    return CUTE_SLIPS if shipped.forward else CUTE_BACKWARD_SLIPS


def short(name: str) -> str:
    """A shipped variant's name in those of its copies."""
    return name.removeprefix("ptx-").replace("cute-flash-forward", "cute").replace("-flash", "")


MODULES = (split_q, split_kv, share_kv, share_qkv, tiling_qk, tiling_qkv, split_q_fp8)
SHIPPED: list[tuple[Variant, Tiling | None]] = [
    *(
        (variant, module.TILING)
        for module in MODULES
        for variant in getattr(module, "VARIANTS", None) or [module.VARIANT]
    ),
    *((variant, None) for variant in flash_forward.VARIANTS),
    (hopper_forward.VARIANT, None),
    *((variant, None) for variant in hopper_fp8_forward.VARIANTS),
    *((variant, None) for variant in flash_backward.VARIANTS),
]
VARIANTS = [copy for shipped, tiling in SHIPPED for copy in copies_of(shipped, tiling)]
