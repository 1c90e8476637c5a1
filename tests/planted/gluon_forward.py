"""Known-bad copies of the Gluon kernel (kernels/gluon), one slip of the hand each.

The shipped text is edited when a copy is first used, and Triton compiles the edited functions: a
copy follows the kernel, or its edit no longer matches and is an error. Nothing but the edit
differs.
"""

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType

from torch import Tensor

from kernels.gluon import hopper_forward
from verify.cuda.edits import Edit
from verify.variant import AttentionArgs, Config, Support, Variant, Workspace

FOLDER = Path(hopper_forward.__file__).parent
FILES = ("ring", "hopper_forward")  # in the order of their imports


@dataclass(frozen=True)
class Slip:
    """An edit of the texts of FILES, and what it makes wrong."""

    edit: Edit
    about: str


SLIPS = {
    "missing-wait": Slip(
        Edit(r"(?<!_)slot = await_tile\(k_here, t, STAGES\)", "slot = t % STAGES"),
        "reads a tile of K without waiting for its bytes",
    ),
    "early-refill": Slip(
        # V's refill comes before P V.
        Edit(
            r"(?s)( {12}v_tile = v_ring\.index\(last_slot\)\n)(.*?)"
            r"( {12}row_kv = nth_block\(walk, t - 1 \+ STAGES\) \* BLOCK_N\n.*?"
            r" {12}fetch\(v, [^\n]*\n)",
            r"\1            meet()\n\3\2",
        ),
        "copies the next tile of V over the one that P V still has to read",
    ),
    "mask-bound": Slip(
        Edit(r"key\[None, :\] < high\[:, None\]", "key[None, :] <= high[:, None]"),
        "sees one key too many in every row",
    ),
}


def texts_of(slip: str) -> dict[str, str]:
    """The edited texts of FILES.  Raises EditError."""
    shipped = {name: (FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in FILES}
    return SLIPS[slip].edit.apply(shipped)


@cache
def copy_of(slip: str) -> ModuleType:
    """hopper_forward.py with that slip, and with a ring of its own."""
    prefix = f"planted_gluon_{slip.replace('-', '_')}"
    modules = []
    for name, text in texts_of(slip).items():
        own = text.replace("from kernels.gluon.ring import", f"from {prefix}_ring import")
        module = ModuleType(f"{prefix}_{name}")
        module.__file__ = f"<{slip}: {name}.py>"
        # Triton asks `inspect` for the text of a function, which finds it here.
        lines = own.splitlines(keepends=True)
        linecache.cache[module.__file__] = (len(own), None, lines, module.__file__)
        sys.modules[module.__name__] = module
        exec(compile(own, module.__file__, "exec"), module.__dict__)
        modules.append(module)
    return modules[-1]


def forward(
    slip: str, args: AttentionArgs, out: Tensor, lse: Tensor | None, workspace: Workspace
) -> None:
    """The entry point of that copy."""
    SUPPORT.check(args, out)
    copy_of(slip).forward(args, out, lse, workspace)


def forward_of(slip: str) -> Callable[[AttentionArgs, Tensor, Tensor | None, Workspace], None]:
    """The entry point of that copy, without its name."""
    return partial(forward, slip)


# One slot, into which every next tile is copied: a head dim of 256 leaves no room for a second.
CONFIG: Config = hopper_forward.VARIANT.configs[0]
SUPPORT: Support = replace(
    hopper_forward.SUPPORT,
    dtypes=("float16",),
    head_dims=(256,),
    masks=("full", "causal"),
    intersections=False,
    min_seqlen=1,
)
VARIANTS: list[Variant] = [
    replace(
        hopper_forward.VARIANT,
        name=f"planted-gluon-{slip}",
        family="planted",
        configs=(CONFIG,),
        support=SUPPORT,
        forward=forward_of(slip),
        builds=None,
        compilable=None,
        head_dim_buckets=(256,),
    )
    for slip in SLIPS
]
