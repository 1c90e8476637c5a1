"""Architectures: one value each.  A new one is one entry of `_TABLE`, or one call of `register`,
and a unit of its own in `verify.arithmetic.units` where it borrows none."""

from __future__ import annotations

import re
from dataclasses import dataclass

MMASIM = "MMA-Sim, arXiv 2511.10909"
SASS = "SASS of NVRTC 13.0"

# Matrix instructions that a kernel may name.  "fma" is no matrix instruction: fused multiply-adds
# in the accumulator's dtype, by the scalar units of a GPU or by a CPU.
INSTRUCTIONS = ("mma.sync", "wgmma", "tcgen05", "wmma", "fma")


@dataclass(frozen=True)
class Arch:
    """One architecture.

    name: "sm_90", "cpu" or "interpreter" (Triton's, on a CPU).
    instructions: those of INSTRUCTIONS that it has, "fma" aside, which all have.
    suffix: of the target that unlocks its own instructions ("a": sm_90a).
    compiled: whether the collection is compiled for it on a machine without a GPU.
    borrows: whose matrix units it is known to have, "" for units of its own; why: how that is
    known.
    listed: whether it is known at all, rather than the generation of a device that is newer than
    this table.
    """

    name: str
    instructions: tuple[str, ...] = ()
    suffix: str = ""
    compiled: bool = False
    borrows: str = ""
    why: str = ""
    listed: bool = True

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA's compute capability, or None for what is no GPU."""
        number = re.fullmatch(r"sm_(\d+)(\d)", self.name, re.ASCII)
        return (int(number[1]), int(number[2])) if number else None

    @property
    def target(self) -> str:
        """What a compiler is asked for: "sm_86", "sm_90a"."""
        return self.name + self.suffix


_OLD = ("mma.sync", "wmma")
_HOPPER = ("mma.sync", "wgmma", "wmma")
_BLACKWELL = ("mma.sync", "tcgen05", "wmma")
_SAME = f"the same instructions: {SASS}"

_TABLE = (
    Arch("sm_70", _OLD),
    Arch("sm_72", _OLD, borrows="sm_70", why="Volta, with the instructions of sm_70"),
    Arch("sm_75", _OLD),
    Arch("sm_80", _OLD, compiled=True),
    Arch("sm_86", _OLD, compiled=True, borrows="sm_80", why=f"the same results: {MMASIM}"),
    Arch("sm_87", _OLD, borrows="sm_80", why=_SAME),
    Arch("sm_88", _OLD, borrows="sm_80", why=f"the same instructions, none for fp8: {SASS}"),
    Arch("sm_89", _OLD, compiled=True),
    Arch("sm_90", _HOPPER, "a", compiled=True),
    Arch("sm_100", _BLACKWELL, "a", compiled=True),
    Arch("sm_101", _BLACKWELL, "a", borrows="sm_100", why="sm_110's earlier name"),
    Arch("sm_103", _BLACKWELL, "a", borrows="sm_100", why=_SAME),
    Arch("sm_110", _BLACKWELL, "a", borrows="sm_100", why=_SAME),
    Arch("sm_120", _OLD, "a", compiled=True),
    Arch("sm_121", _OLD, "a", borrows="sm_120", why=_SAME),
    Arch("cpu"),
    Arch("interpreter"),
)
_known = {arch.name: arch for arch in _TABLE}


def register(arch: Arch) -> None:
    """Add an architecture; raises ValueError for a name that is taken, an instruction that is none,
    or a lender that is unknown or borrows itself."""
    unknown = [word for word in arch.instructions if word not in INSTRUCTIONS]
    if arch.name in _known:
        raise ValueError(f"arch: {arch.name!r} is known already")
    if unknown:
        raise ValueError(f"arch.instructions: {unknown[0]!r} is none of {', '.join(INSTRUCTIONS)}")
    if arch.borrows and (arch.borrows not in _known or _known[arch.borrows].borrows):
        raise ValueError(f"arch.borrows: {arch.borrows!r} has no units of its own to lend")
    _known[arch.name] = arch


def unregister(name: str) -> None:
    """Take back what `register` added; raises KeyError for no such architecture."""
    del _known[name]


def archs() -> tuple[Arch, ...]:
    """All of them, in the order of their capability, and then those that are no GPU."""
    return tuple(sorted(_known.values(), key=lambda arch: arch.capability or (1000, 0)))


def compiled_archs() -> tuple[str, ...]:
    """The targets that the collection is compiled for on a machine without a GPU."""
    return tuple(arch.target for arch in archs() if arch.compiled)


def arch_named(word: str) -> Arch:
    """The architecture of that name, with or without the letter of its target ("sm_90", "sm_90a",
    "cpu"); a generation that the table does not know ("sm_999") is not `listed`.  Raises ValueError
    for a word that names none."""
    generation = re.fullmatch(r"(sm_\d{2,3})[af]?", word, re.ASCII)
    name = generation[1] if generation else word
    if name in _known:
        return _known[name]
    if generation is None:
        known = ", ".join(arch.name for arch in archs())
        raise ValueError(f"arch: {word!r} is none of {known}, nor another sm_<number>")
    return Arch(name, suffix="a" if int(name[3:-1]) >= 9 else "", listed=False)


def arch_of(capability: tuple[int, int]) -> Arch:
    """The architecture of that compute capability."""
    return arch_named("sm_{}{}".format(*capability))


def table() -> str:
    """Markdown: what is known of each architecture, as docs/arithmetic.md has it."""
    rows = ["| arch | instructions | compiled without a GPU | matrix units |", "|---|---|---|---|"]
    for arch in archs():
        units = f"as {arch.borrows}: {arch.why}" if arch.borrows else "its own"
        words = ", ".join((*arch.instructions, "fma"))
        rows.append(f"| {arch.name} | {words} | {arch.target if arch.compiled else ''} | {units} |")
    return "\n".join(rows)
