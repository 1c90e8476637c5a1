"""Makes known-bad copies of a Gluon kernel (kernels/gluon), one slip of the hand each.

The shipped text is edited when a copy is first used, and Triton compiles the edited functions: a
copy follows the kernel, or its edit no longer matches and is an error. Nothing but the edit
differs.
"""

import linecache
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType

from torch import Tensor

from kernels import gluon
from tests.planted.here import unavailable
from verify.cuda.edits import Edit
from verify.variant import AttentionArgs, Config, Support, Variant, Workspace

FOLDER = Path(gluon.__path__[0])


@dataclass(frozen=True)
class Slip:
    """Edits of a kernel's texts, and what they make wrong."""

    edits: tuple[Edit, ...]
    about: str


# Of every forward that waits for K in its ring.
MISSING_WAIT = Slip(
    (Edit(r"(?<!_)slot = await_tile\(k_here, t, STAGES\)", "slot = t % STAGES"),),
    "reads a tile of K without waiting for its bytes",
)
# Of every forward that hides keys by `softmax.scores`.
MASK_BOUND = Slip(
    (Edit(r"key\[None, :\] < high\[:, None\]", "key[None, :] <= high[:, None]"),),
    "sees one key too many in every row",
)
# Of every forward that stores the LSE of its own rows (rows.py).
OVERRUN = Slip(
    (Edit(r"mask=rows < seqlen_q\)", "mask=rows <= seqlen_q)"),),
    "writes one element of LSE too many",
)


@dataclass(frozen=True, eq=False)
class Copies:
    """The known-bad copies of one kernel.

    files: modules of kernels/gluon that a copy has of its own, in the order of their imports; the
    last one is the kernel's.  config, support: what the copies are judged with.
    """

    name: str
    files: tuple[str, ...]
    slips: Mapping[str, Slip]
    shipped: Variant
    config: Config
    support: Support

    def texts_of(self, slip: str) -> dict[str, str]:
        """The edited texts of `files`.  Raises EditError."""
        texts = {name: (FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in self.files}
        for edit in self.slips[slip].edits:
            texts = edit.apply(texts)
        return texts

    @cache  # noqa: B019 - the few copies of a module live as long as it
    def copy_of(self, slip: str) -> ModuleType:
        """The kernel's module with that slip, and with other files of its own."""
        prefix = f"planted_{self.name}_{slip}".replace("-", "_")
        modules = []
        for name, text in self.texts_of(slip).items():
            own = text
            for other in self.files[:-1]:
                shipped = f"from kernels.gluon.{other} import"
                own = own.replace(shipped, f"from {prefix}_{other} import")
            module = ModuleType(f"{prefix}_{name}")
            module.__file__ = f"<{slip}: {name}.py>"
            # Triton asks `inspect` for the text of a function, which finds it here.
            lines = own.splitlines(keepends=True)
            linecache.cache[module.__file__] = (len(own), None, lines, module.__file__)
            sys.modules[module.__name__] = module
            exec(compile(own, module.__file__, "exec"), module.__dict__)
            modules.append(module)
        return modules[-1]

    def variants(self) -> list[Variant]:
        """One for each slip."""
        return [
            replace(
                self.shipped,
                name=f"planted-{self.name}-{slip}",
                family="planted",
                configs=(self.config,),
                further_configs=None,
                support=self.support,
                forward=partial(self._forward, slip),
                builds=None,
                compilable=None,
                available=partial(unavailable, self.shipped),
                head_dim_buckets=self.support.head_dims,
            )
            for slip in self.slips
        ]

    def _forward(
        self,
        slip: str,
        args: AttentionArgs,
        out: Tensor,
        lse: Tensor | None,
        workspace: Workspace,
    ) -> None:
        self.support.check(args, out)
        self.copy_of(slip).forward(args, out, lse, workspace)


def narrow(support: Support, head_dim: int = 256) -> Support:
    """What the copies are judged with: one dtype, and the head dim that leaves least room for
    slots."""
    return replace(
        support,
        dtypes=support.dtypes[:1],
        head_dims=(head_dim,),
        masks=("full", "causal"),
        intersections=False,
        min_seqlen=1,
    )
