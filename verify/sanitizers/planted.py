"""Planted faults: kernels that are known to be wrong, and correct twins, tried in every run.

They are treated exactly like other kernels: the same program, tool, options and reading of its
files.  If a tool misses a fault that it must catch, or convicts a twin, its run proves nothing.
"""

from __future__ import annotations

from dataclasses import replace

from verify.bundle import ROOT
from verify.problem import Problem
from verify.problem.storage.transposed import TransposedV
from verify.sanitizers.fault import MANUAL, PlantedFault
from verify.sanitizers.tool import CONSAN, FPSAN, POISONED, SHARED_SPACE, SKEW
from verify.variant import Declaration

FOLDER = ROOT / "tests" / "planted"


def planted_problem(declaration: Declaration) -> Problem:
    """A contiguous problem with a ragged last tile in both lengths and several KV tiles, for a
    planted kernel."""
    support = declaration.support
    problem = Problem(
        heads_q=2,
        heads_kv=2,
        seqlen_q=203,
        seqlen_kv=203,
        head_dim=min(support.head_dims),
        dtype=support.dtypes[0],
        seed=1,
    )
    by_columns = "transposedv" in support.storages
    return replace(problem, layout_v=TransposedV()) if by_columns else problem


_WRITE, _READ, _RACE = r"\bwrite\b", r"\bread\b", r"\brace\b|\bhazard\b"
_TINY, _COPIES, _GLUON, _PARTITIONS, _ALGEBRA = (
    FOLDER / f"{name}.py" for name in ("tiny", "copies", "tiny_gluon", "tiny_partitions", "algebra")
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
    "cute-d64": "cute-flash-forward-d64",
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
    replace(
        _gluon("planted-gluon-partitions", "the same in three partitions that share nothing"),
        file=_PARTITIONS,
    ),
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


_UNSEEN_OF_ALGEBRA = {
    "stale-output": "O of an even number of keys: it is divided by an even sum, which loses bits;"
    " on an H100 no element differed, in 10 of 10 runs",
}


def _algebra(variant: str, about: str, *, twin: bool = False, unseen: str = "") -> PlantedFault:
    """A kernel of algebra.py."""
    return PlantedFault(
        variant=variant,
        file=_ALGEBRA,
        about=about,
        twin=twin,
        caught_by=() if twin or unseen else (FPSAN,),
        shows=() if twin else ("the plain kernel",),
        unseen=unseen,
        by_triton=True,
        optional=True,
        algebra=True,
    )


ALGEBRA: tuple[PlantedFault, ...] = (
    _algebra("planted-algebra-correct", "a small Triton forward without a slip", twin=True),
    *(
        _algebra(f"planted-algebra-{slip}", what, unseen=_UNSEEN_OF_ALGEBRA.get(slip, ""))
        for slip, what in _SLIPS_OF_ALGEBRA.items()
    ),
)

# Of the Gluon kernels' copies: the kernel, the file of its copies, and by slip the tool that is
# tried first.  ConSan does not know the barrier of a cluster; delays are tried there.
_GLUON_COPIES = {
    "gluon": ("gluon-hopper-forward", "gluon_forward", CONSAN),
    "gluon-turnstile": ("gluon-hopper-forward", "gluon_turnstile", CONSAN),
    "gluon-fp8": ("gluon-hopper-fp8-forward", "gluon_fp8_forward", CONSAN),
    "gluon-cluster": ("gluon-hopper-cluster-forward", "gluon_cluster_forward", SKEW),
}
_GLUON_SLIPS = {
    "overrun": (SLIPS["overrun"][0], (_WRITE,)),
    "missing-wait": ("a wait for a tile of K removed", ("outstanding|pending",)),
    "early-refill": (
        "a tile of V copied over the one that is still to be read",
        ("outstanding|pending",),
    ),
}
GLUON_COPIES = tuple(
    PlantedFault(
        variant=f"planted-{name}-{slip}",
        file=FOLDER / f"{file}.py",
        about=f"{shipped}: {about}",
        caught_by=("memcheck",) if slip == "overrun" else (ordering,),
        shows=shows,
        copy_of=shipped,
        spare=True,
        by_triton=True,
        optional=True,
        cluster=ordering == SKEW,
    )
    for name, (shipped, file, ordering) in _GLUON_COPIES.items()
    for slip, (about, shows) in _GLUON_SLIPS.items()
    # Over clusters nothing but a model of its barriers shows that one: no run on an H100 did.
    if (name, slip) != ("gluon-cluster", "early-refill")
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
