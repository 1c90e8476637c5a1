"""Planted faults: kernels that are known to be wrong, and correct twins, tried in every run.

They are treated exactly like other kernels: the same program, tool, options and reading of its
files.  If a tool misses a fault that it must catch, or convicts a twin, its run proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verify.bundle import ROOT
from verify.problem import Problem
from verify.sanitizers.facts import Judgement
from verify.sanitizers.records import Record
from verify.sanitizers.tool import (
    CONSAN,
    FPSAN,
    INSTRUMENTING,
    POISONED,
    SHARED_SPACE,
    SKEW,
    Sanitizer,
)
from verify.variant import Declaration

FOLDER = ROOT / "tests" / "planted"


MANUAL = "NVIDIA Compute Sanitizer 2025.3.1"
# What each tool does not look at: the reason why it need not see the other tools' faults.
BLIND = {
    "memcheck": f"order of accesses, barriers and unwritten memory ({MANUAL}: Memcheck checks the"
    " address and the alignment of each access)",
    "racecheck": f"global memory, addresses and barriers that order nothing ({MANUAL}: Racecheck"
    " finds hazards between accesses to shared memory)",
    "initcheck": f"shared memory, and memory written before ({MANUAL}: Initcheck finds reads of"
    " global memory that nothing has written; shared memory only from 13.1 on)",
    "skew": "addresses, unwritten memory, and barriers whose absence changes no result (it compares"
    " the bits of results)",
    "consan": "registers, global memory and the order of warps of one partition (it models which"
    " partition may see a tile of shared or tensor memory, and each mbarrier)",
    "fpsan": "order, memory and rounding (it compares what is computed, in integers)",
    "synccheck": f"memory ({MANUAL}: Synccheck finds invalid uses of barriers and of wgmma)",
}


@dataclass(frozen=True, kw_only=True)
class PlantedFault:
    """One planted kernel: `variant` of `file`.

    twin: it is right, and must be clean under every tool.  caught_by: the tools that must catch it.
    shows: regular expressions that a record of this fault matches, anywhere in its text and
    ignoring case.  unseen: why no tool sees it, if none does.  needs: the
    option without which no tool must catch it.  copy_of: the shipped variant that it
    is a known-bad copy of; it is left out where that cannot run.  spare: other copies show that the
    tools in `caught_by` are alive.  It is tried under these alone, and if they miss it, delays must
    show it (`verify.sanitizers.skew`).  by_triton: Triton compiles it, so that it is tried under
    its tools and with delays alone; the other faults are not tried under Triton's tools.
    optional: it is left out where it cannot run.  cluster: its CTAs share a tile, and wait for each
    other at a barrier that ConSan does not know, so that it is tried with delays alone.  algebra:
    it is for FPSan alone, which compares it with a plain kernel.
    """

    variant: str
    file: Path
    about: str
    twin: bool = False
    caught_by: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()
    unseen: str = ""
    needs: str = ""
    copy_of: str = ""
    spare: bool = False
    by_triton: bool = False
    optional: bool = False
    cluster: bool = False
    algebra: bool = False

    def under(self, sanitizer: Sanitizer) -> PlantedFault:
        """The fault as that sanitizer must treat it."""
        if not self.needs or self.needs in sanitizer.offers:
            return self
        return replace(self, caught_by=(), unseen=f"that needs {self.needs}: a newer version")

    def wanted(self, tool: str) -> str:
        """The required result: "caught", "clean", or "any" if nothing is required of that tool."""
        if self.spare:
            return "any"
        return "clean" if self.twin else "caught" if tool in self.caught_by else "any"

    def tried_under(self, tools: Sequence[str]) -> tuple[str, ...]:
        """Those of the tools that it is tried under.  Delays are for faults that they can show."""
        if self.by_triton:
            own: tuple[str, ...] = (CONSAN,)
            if self.algebra:
                own = (FPSAN,)
            elif self.cluster:
                own = (SKEW,)
            elif not (self.spare or self.twin):
                own = (CONSAN, SKEW)
            return tuple(tool for tool in tools if tool in own)
        everywhere = not self.spare
        return tuple(
            tool
            for tool in tools
            if tool in self.caught_by
            or (everywhere and tool not in INSTRUMENTING and (tool != SKEW or self.twin))
        )

    def repeats_within(self, tool: str) -> bool:
        """Whether one process can try it several times, and tell each try from the others.

        A twin that is clean is clean in every try, and the suite's own comparisons of bits judge
        each case.  A record of another tool names no launch, and an error of memory ends the
        process.
        """
        return self.twin or tool in (SKEW, FPSAN)

    def held(self, tool: str, judgement: Judgement, tries: int) -> int:
        """In how many of the tries in one process the required result came."""
        if self.wanted(tool) == "caught" and self.repeats_within(tool):
            shown = sum(self._shows(record) for record in judgement.records)
            return min(shown, tries) if judgement.outcome == "faulty" else 0
        return tries if self.holds(tool, judgement) else 0

    def blind(self, tool: str) -> str:
        """Why the tool is not required to see the fault; "" where something is required of it."""
        if self.spare or self.wanted(tool) != "any":
            return ""
        return self.unseen or BLIND[tool]

    def shown_by(self, judgement: Judgement) -> Record | None:
        """The record that shows this fault, if there is one."""
        fitting = filter(self._shows, judgement.records)
        return next(fitting, None) if judgement.outcome == "faulty" else None

    def _shows(self, record: Record) -> bool:
        """Whether that record shows the fault, whatever else is in doubt."""
        said = f"{record.kind} {record.words}"
        return record.tool == SKEW or all(
            re.search(words, said, re.IGNORECASE) for words in self.shows
        )

    def holds(self, tool: str, judgement: Judgement) -> bool:
        """Whether the judgement is the required one."""
        wanted = self.wanted(tool)
        if wanted == "caught":
            return self.shown_by(judgement) is not None
        return wanted == "any" or judgement.outcome == "clean"


def planted_problem(declaration: Declaration) -> Problem:
    """A contiguous problem with a ragged last tile in both lengths and several KV tiles, for a
    planted kernel."""
    support = declaration.support
    return Problem(
        heads_q=2,
        heads_kv=2,
        seqlen_q=203,
        seqlen_kv=203,
        head_dim=min(support.head_dims),
        dtype=support.dtypes[0],
        seed=1,
    )


_WRITE, _READ, _RACE = r"\bwrite\b", r"\bread\b", r"\brace\b|\bhazard\b"
_TINY, _COPIES, _GLUON, _GLUON_COPIES, _ALGEBRA = (
    FOLDER / f"{name}.py" for name in ("tiny", "copies", "tiny_gluon", "gluon_forward", "algebra")
)

# Slip of the hand in a copy -> what it is, the tool that must catch it, what its record shows.
SLIPS = {
    "overrun": ("one row or element too many written: < became <=", "memcheck", (_WRITE,)),
    "missing-barrier": ("a barrier between a write and a read removed", "racecheck", (_RACE,)),
    "early-copy-read": ("waits for one group of copies too few", "racecheck", (_RACE,)),
}
# By the name in their copies' names (tests/planted/copies.py), the CUDA variants of the collection.
COPIED = {
    **{
        name: f"ptx-{name}"
        for tiling in ("split-q", "split-kv", "share-kv", "share-qkv", "tiling-qk", "tiling-qkv")
        for name in (tiling, f"{tiling}-f16")
    },
    "split-q-fp8": "ptx-split-q-fp8",
    "cute": "cute-flash-forward",
    **{
        name: name
        for name in (
            "cute-hopper-forward",
            "cute-hopper-fp8-forward",
            "cute-hopper-fp8-unpromoted-forward",
        )
    },
    "cute-backward": "cute-flash-backward",
    "cute-backward-atomic": "cute-flash-backward-atomic",
}
_PROOFS = ("split-q", "cute")  # their copies show in every run that the tools are alive
_DELAYED = ("split-q", "missing-barrier")  # this one, that delays show a race


def _copies() -> tuple[PlantedFault, ...]:
    """A copy of every CUDA variant for each slip."""
    return tuple(
        PlantedFault(
            variant=f"planted-{name}-{slip}",
            file=_COPIES,
            about=f"{shipped}: {about}",
            caught_by=(tool, SKEW) if (name, slip) == _DELAYED else (tool,),
            shows=shows,
            copy_of=shipped,
            spare=name not in _PROOFS,
        )
        for name, shipped in COPIED.items()
        for slip, (about, tool, shows) in SLIPS.items()
    )


COPIES = _copies()


def _tiny(variant: str, about: str, tool: str = "", *shows: str, unseen: str = "") -> PlantedFault:
    """A fault of tiny.py, whose kernel a record names."""
    return PlantedFault(
        variant=variant,
        file=_TINY,
        about=about,
        caught_by=(tool,) if tool else (),
        shows=(variant.replace("-", "_"), *shows),
        unseen=unseen,
    )


def _gluon(variant: str, about: str, *shows: str, cluster: bool = False) -> PlantedFault:
    """A fault of tiny_gluon.py, or without `shows` a twin: for a Triton and a device that have its
    instructions."""
    return PlantedFault(
        variant=variant,
        file=_GLUON,
        about=about,
        twin=not shows,
        caught_by=(CONSAN,) if shows and not cluster else (),
        shows=shows,
        by_triton=True,
        unseen="ConSan does not know the barrier of a cluster" if shows and cluster else "",
        optional=True,
        cluster=cluster,
    )


GLUON: tuple[PlantedFault, ...] = (
    _gluon("planted-gluon-correct", "a small Gluon kernel that copies tiles, without a fault"),
    _gluon(
        "planted-gluon-dropped-wait",
        "reads a tile of the copy engine without waiting at its mbarrier",
        "outstanding writes",
    ),
    _gluon(
        "planted-gluon-early-copy-read",
        "reads what cp.async copies, and does not wait for the copies",
        "outstanding|pending",
    ),
    _gluon(
        "planted-gluon-cluster-correct", "the same for two CTAs, which share a tile", cluster=True
    ),
    _gluon(
        "planted-gluon-cluster-dropped-wait",
        "reads a tile that is copied into both CTAs without waiting at its mbarrier",
        "outstanding writes",
        cluster=True,
    ),
)

# Slips of algebra in algebra.py -> what they do.
_SLIPS_OF_ALGEBRA = {
    "swapped-operand": "takes its scores from V where K belongs",
    "wrong-scale": "scales the scores of one block of keys twice",
    "lost-block": "leaves out one block of keys",
    "stale-sum": "rescales O to a new maximum, and not the sum of its weights",
    "stale-output": "rescales the sum of the weights to a new maximum, and not O",
}


def _algebra(variant: str, about: str, *, twin: bool = False) -> PlantedFault:
    """A kernel of algebra.py."""
    return PlantedFault(
        variant=variant,
        file=_ALGEBRA,
        about=about,
        twin=twin,
        caught_by=() if twin else (FPSAN,),
        shows=() if twin else ("the plain kernel",),
        by_triton=True,
        optional=True,
        algebra=True,
    )


ALGEBRA: tuple[PlantedFault, ...] = (
    _algebra("planted-algebra-correct", "a small Triton forward without a slip", twin=True),
    *(_algebra(f"planted-algebra-{slip}", what) for slip, what in _SLIPS_OF_ALGEBRA.items()),
)

# Of the slips in gluon_forward.py those that are races.
_GLUON_SLIPS = {
    "missing-wait": "a wait for a tile of K removed",
    "early-refill": "a tile of V copied over the one that is still to be read",
}
GLUON_COPIES = tuple(
    PlantedFault(
        variant=f"planted-gluon-{slip}",
        file=_GLUON_COPIES,
        about=f"gluon-hopper-forward: {about}",
        caught_by=(CONSAN,),
        shows=("outstanding|pending",),
        copy_of="gluon-hopper-forward",
        spare=True,
        by_triton=True,
        optional=True,
    )
    for slip, about in _GLUON_SLIPS.items()
)

FAULTS: tuple[PlantedFault, ...] = (
    PlantedFault(
        variant="planted-correct", file=_TINY, about="a small kernel without a fault", twin=True
    ),
    _tiny("planted-overrun", "writes the element behind the last one of O", "memcheck", _WRITE),
    _tiny("planted-overread", "reads the element behind the last one of Q", "memcheck", _READ),
    _tiny(
        "planted-shared-overrun",
        "writes behind its shared memory",
        "memcheck",
        "__shared__",
        _WRITE,
    ),
    _tiny(
        "planted-misaligned-load",
        "loads four floats at once from an address that 16 does not divide",
        "memcheck",
        "misaligned",
    ),
    _tiny("planted-use-after-free", "reads memory that was freed before", "memcheck", _READ),
    _tiny(
        "planted-missing-barrier",
        "reads what other warps wrote to shared memory, with no barrier between",
        "racecheck",
        _RACE,
    ),
    _tiny(
        "planted-early-copy-read",
        "reads what cp.async copies to shared memory, and does not wait for the copies",
        "racecheck",
        _RACE,
    ),
    _tiny(
        "planted-missing-mbarrier-wait",
        "arrives at an mbarrier, and reads what other warps wrote without waiting there",
        "racecheck",
        _RACE,
    ),
    _tiny(
        "planted-divergent-barrier",
        "a part of a warp arrives at __syncthreads, the other part goes on",
        "synccheck",
        "divergent",
    ),
    _tiny(
        "planted-uninitialised-read",
        "reads an allocation that nothing has written",
        "initcheck",
        "uninitialized",
    ),
    replace(
        _tiny(
            "planted-dirty-workspace",
            "reads its workspace, which it has not written",
            "initcheck",
            "uninitialized",
        ),
        # Over poison its bits differ between two runs; initcheck's workspaces hold none.
        caught_by=("initcheck", POISONED),
        shows=("planted_dirty_workspace|over other poison", "uninitialized|over other poison"),
    ),
    replace(
        _tiny(
            "planted-unwritten-shared",
            "reads shared memory that nothing has written",
            "initcheck",
            "uninitialized",
            "shared",
        ),
        needs=SHARED_SPACE,
    ),
    _tiny(
        "planted-leak",
        "keeps an allocation after the launch",
        unseen=f"memory that is never freed ({MANUAL}: --leak-check looks when a context is"
        " destroyed, which PyTorch's is not; campaigns record the growth of a process's memory)",
    ),
    *GLUON,
    *ALGEBRA,
    *GLUON_COPIES,
    *COPIES,
)
