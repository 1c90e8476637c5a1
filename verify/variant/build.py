"""Builds: what can be compiled without a GPU, what a compiler says of it, and what it declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

INSTRUCTIONS = (
    *("MMA", "HMMA", "QMMA", "IMMA", "DMMA", "HGMMA", "QGMMA", "UTCMMA"),
    *("LDSM", "STSM", "LDS", "STS", "LDGSTS", "UTMALDG", "UBLKCP", "LDG", "STG", "LDL", "STL"),
    *("MUFU", "SHFL", "BAR", "FP32", "FP16", "INT", "UNIFORM", "CONVERT", "MOVE"),
)
"""The kinds of SASS instructions that are counted; `verify.cuda.sass` says what each holds."""

_LOCAL = ("LDL", "STL")


@dataclass(frozen=True)
class Resources:
    """What a compiler says that one kernel needs: registers per thread; shared memory per block,
    stack, spill stores and spill loads per thread, in bytes.  shared: static and dynamic, as the
    launch would ask for."""

    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.  entry: its name in the cubin.

    resources.shared: of `verify.cuda.compile.compile_source` static shared memory only; what
    `Build.compile` returns has dynamic shared memory, too.
    """

    cubin: bytes
    entry: str
    resources: Resources


@dataclass(frozen=True)
class Build:
    """One binary of a variant: its name (config, dtype, head-dim bucket, mask kind...), how to
    compile it without a GPU, and what must hold of the result.

    compile() returns the binary, or its resources alone where no binary can be had, whose
    instructions are then not read.  It raises if the build cannot be compiled, with the compiler's
    words.

    spill_budget: bytes per thread that spill stores and loads together, and the stack, may take.
    0: none, and no LDL or STL either.  None: no budget; spills are reported and never fail.
    expects: kinds of INSTRUCTIONS that the binary must contain.

    Raises ValueError for a negative budget and for an unknown kind.
    """

    name: str
    compile: Callable[[], Binary | Resources]
    spill_budget: int | None = 0
    expects: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.spill_budget is not None and self.spill_budget < 0:
            raise ValueError(
                f"spill_budget: {self.spill_budget} is no number of bytes: give 0 or more, or None"
                " for no budget"
            )
        if unknown := [kind for kind in self.expects if kind not in INSTRUCTIONS]:
            raise ValueError(f"expects: {unknown[0]!r} is none of {', '.join(INSTRUCTIONS)}")

    def broken(self, resources: Resources, counts: Mapping[str, int] | None) -> Iterator[str]:
        """What does not hold of a compiled build, one sentence each.

        counts: of its instructions, by kind; None if they were not read.
        """
        spills = resources.spill_stores + resources.spill_loads
        if self.spill_budget is not None and max(spills, resources.stack) > self.spill_budget:
            yield (
                f"spills {resources.spill_stores} + {resources.spill_loads} bytes per thread (stack"
                f" {resources.stack}), its budget is {self.spill_budget}: spill less, or declare"
                " the new number as Build(spill_budget=...)"
            )
        if counts is None:
            return
        if missing := [kind for kind in self.expects if not counts.get(kind)]:
            yield f"has no {', '.join(missing)} instruction, which Build(expects=...) declares"
        local = [f"{counts[kind]} {kind}" for kind in _LOCAL if counts.get(kind)]
        if self.spill_budget == 0 and local:
            yield f"has {' and '.join(local)} instructions: local memory, at a spill budget of 0"
