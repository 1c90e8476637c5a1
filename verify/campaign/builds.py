"""Builds: compiles kernels without a GPU for the profile's architectures, records resources and
instructions, and holds each build to what it declares of them.

Profile dev compiles for one architecture, as a first look one variant of each kernel file; ci for
that one and half of the others, the larger profiles for all (`arches`).  If time is short, only the
first builds are compiled; the others are recorded as listed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verify.campaign.halt import over
from verify.cell.process import COMPILER, TRITON_COMPILER, Cell, Environment, ForkServer, Reply
from verify.evidence import Built, NotRun, Recorder
from verify.machine.extras import lacked_by
from verify.variant import Declaration, arch_named, compiled_archs

# The architecture that every profile compiles for.
_LEADING = "sm_90a"
# Families of which each build takes 10 to 45 s of CPU time, for CUTLASS's templates.
_SLOW = ("cute",)
# Seconds for the builds of one variant on a small machine.  They are spent on one architecture:
# ptxas differs between two, the source does not.  For each of the others the first build is
# compiled; a variant lists its most important builds first.
_SECONDS = {"dev": 1.5, "ci": 3.0}
# Seconds more for disassembling binaries whose instructions no earlier run has counted.
_DISASSEMBLY = {"dev": 0.5, "ci": 1.0}


def arches(
    profile: str, declarations: Sequence[Declaration], *, first_look: bool = False
) -> dict[str, tuple[str, ...]]:
    """The architectures that a profile compiles for: by ref, of each variant that has builds.

    first_look: whether those that `_left_to_ci` names are not compiled.

    Profile ci deals the architectures other than the leading one to the variants of a family, whose
    sources are alike: a variant gets every third one, its next two variants the rest; every second
    one in a family of one or two.
    """
    every = compiled_archs()
    others = [arch for arch in every if arch != _LEADING]
    compiling = [declaration for declaration in declarations if declaration.compiles]
    families = Counter(declaration.family for declaration in compiling)
    dealt: Counter[str] = Counter()
    spared = _left_to_ci(compiling) if first_look else frozenset()
    chosen = {}
    for declaration in compiling:
        family = declaration.family
        dealt[family] += 1
        step = 3 if families[family] >= 3 else 2
        share = {"dev": [], "ci": others[dealt[family] % step :: step]}.get(profile, others)
        wanted = () if declaration.ref in spared else (_LEADING, *share)
        chosen[declaration.ref] = tuple(arch for arch in every if arch in wanted)
    return chosen


def _left_to_ci(declarations: Sequence[Declaration]) -> frozenset[str]:
    """Refs of the variants whose builds a first look leaves to the other profiles: all but one of
    each file, and of a slow family all that run on more than the leading architecture."""
    leading = arch_named(_LEADING).capability
    asked = []
    for family in dict.fromkeys(each.family for each in declarations):
        members = [each for each in declarations if each.family == family]
        own = [d for d in members if d.support.capability == d.support.max_capability == leading]
        asked += (own or members[:1]) if family in _SLOW else members
    kept = {each.path: each.ref for each in reversed(asked)}
    return frozenset({each.ref for each in declarations} - set(kept.values()))


def left_out(profile: str, chosen: tuple[str, ...]) -> str:
    """A text that names the architectures that a profile leaves out for a variant; "" if there are
    none.

    chosen: the variant's, of `arches`.
    """
    missing = [arch for arch in compiled_archs() if arch not in chosen]
    return (
        f"not compiled for {', '.join(missing)}: profile {profile} leaves these to larger ones"
        if missing
        else ""
    )


def environment_for(declarations: Sequence[Declaration]) -> Environment:
    """The environment to compile these in: with Triton's compiler imported once for all kernel
    processes, if any file speaks of Triton."""
    files = {declaration.path for declaration in declarations}
    triton = any(b"triton" in Path(file).read_bytes() for file in files)
    return TRITON_COMPILER if triton else COMPILER


@dataclass
class Builder:
    """Compiles builds in separate cells; close it at the end."""

    recorder: Recorder
    profile: str
    _fork_server: ForkServer = field(default_factory=lambda: ForkServer(COMPILER))

    def close(self) -> None:
        """End the processes that compile."""
        self._fork_server.close()

    def compile(self, declaration: Declaration, arch: str) -> list[str]:
        """Compile the variant's builds for `arch` and record each; returns one text per failure."""
        cell = Cell(self._fork_server)
        try:
            listed = cell.builds(declaration.path, declaration.name, arch)
            if not listed.ok:
                error = _error_text(listed)
                self._record(declaration, arch, "(listing)", error=error)
                return [f"{declaration.ref}: its builds for {arch} cannot be listed: {error}"]
            names = [str(name) for name in listed.data["builds"]]
            spent = _Spent(self.profile, arch)
            failures = []
            for number, name in enumerate(names):
                if number and (spent.all or over()):
                    self._record(declaration, arch, name)
                else:
                    failures += self._compile(cell, declaration, arch, name, spent)
            return failures
        finally:
            cell.close()

    def _compile(
        self, cell: Cell, declaration: Declaration, arch: str, name: str, spent: _Spent
    ) -> list[str]:
        reply = cell.compile(
            declaration.path, declaration.name, arch, name, disassemble=not spent.disassembly
        )
        needs = None if reply.ok else lacked_by(reply.message)
        if needs is not None:  # no compiler is no fault of the kernel's
            self.recorder.write(NotRun(variant=declaration.ref, dtype="(builds)", reason=needs))
            return []
        failed: dict[str, Any] = {"seconds": reply.seconds, "error": _error_text(reply)}
        built = reply.data["built"] if reply.ok else failed
        seconds = built["seconds"]
        spent.compiling += seconds
        spent.disassembling += reply.seconds - seconds
        self._record(declaration, arch, name, **built | {"seconds": round(seconds, 3)})
        if not built["error"]:
            return []
        what = "is not what it declares" if reply.ok else "does not compile"
        return [f"{declaration.ref}: {name} {what} for {arch}: {built['error']}"]

    def _record(self, declaration: Declaration, arch: str, name: str, **known: Any) -> None:
        """known: fields of `Built`."""
        known = {"seconds": 0.0, "resources": None} | known
        self.recorder.write(Built(variant=declaration.ref, arch=arch, build=name, **known))


@dataclass
class _Spent:
    """Seconds that the builds of one variant and architecture took so far."""

    profile: str
    arch: str
    compiling: float = 0.0
    disassembling: float = 0.0

    @property
    def all(self) -> bool:
        """Whether no time is left to compile."""
        limit = _SECONDS.get(self.profile, math.inf)
        return self.compiling > (limit if self.arch == _LEADING or limit == math.inf else 0.0)

    @property
    def disassembly(self) -> bool:
        """Whether no time is left to disassemble."""
        return self.disassembling > _DISASSEMBLY.get(self.profile, math.inf)


def _error_text(reply: Reply) -> str:
    return f"{reply.status}: {reply.message}\n{reply.data.get('traceback', '')}".strip()
