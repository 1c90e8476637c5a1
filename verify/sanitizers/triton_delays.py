"""Delays at the barriers of Triton and Gluon kernels: an edit of the PTX that Triton makes.

What `verify.sanitizers.delays` does to the text of a CUDA kernel, with the same hash of seed, place
and warp: a sleep before and after each barrier and each wait, of up to four microseconds, for a
quarter of the warps at each place.  The seed is the kernel's own amount of dynamic shared memory,
which a launch with a seed makes larger: all seeds run one binary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Waits and barriers, by how their instructions begin.  An arrival alone waits for nothing.
_WAITS = re.compile(
    r"\b(?:bar(?:rier)?(?:\.cta)?(?:\.red\.\w+|\.sync)|bar\.warp\.sync|barrier\.cluster\.wait"
    r"|mbarrier\.(?:try|test)_wait|cp\.async\.(?:bulk\.)?wait_(?:group|all)|wgmma\.wait_group"
    r"|tcgen05\.wait)\b"
)
_BEGINS, _ENDS = "// begin inline asm", "// end inline asm"
_SMALL = 48 << 10  # bytes of dynamic shared memory that a launch may have without being asked for
_KEY = "delays at barriers"
_SLEEPS = "nanosleep.u32 %vd0"


def delayed(ptx: str) -> tuple[str, int]:
    """The PTX with a sleep before and after each wait, and how many waits there are."""
    lines: list[str] = []
    waits = 0
    for unit in _units(ptx.splitlines()):
        if _WAITS.search("\n".join(_code(line) for line in unit)) is None:
            lines += unit
            continue
        lines += [_sleep(2 * waits), *unit, _sleep(2 * waits + 1)]
        waits += 1
    return "\n".join(lines) + "\n", waits


def _units(lines: list[str]) -> list[list[str]]:
    """The lines, those of one piece of inline assembly together: what is put between them could
    stand between a label and its branch."""
    units: list[list[str]] = []
    inside = False
    for line in lines:
        if inside:
            units[-1].append(line)
        else:
            units.append([line])
        inside = (inside or _BEGINS in line) and _ENDS not in line
    return units


def _code(line: str) -> str:
    """The line without its comment."""
    return line.partition("//")[0]


def _sleep(place: int) -> str:
    """PTX that lets some warps sleep: the hash of `verify.sanitizers.delays.BEFORE`."""
    salt = 0x85EBCA6B * place % (1 << 32)
    return (
        "\t{ .reg .b32 %vd<3>; .reg .pred %vp;"
        " mov.u32 %vd0, %dynamic_smem_size; mov.u32 %vd1, %ctaid.x; mov.u32 %vd2, %tid.x;"
        " shl.b32 %vd1, %vd1, 6; shr.u32 %vd2, %vd2, 5; add.u32 %vd1, %vd1, %vd2;"
        f" mul.lo.u32 %vd0, %vd0, {0x9E3779B9}; mad.lo.u32 %vd0, %vd1, {0xC2B2AE35}, %vd0;"
        f" add.u32 %vd0, %vd0, {salt};"
        " shr.u32 %vd1, %vd0, 16; xor.b32 %vd0, %vd0, %vd1;"
        f" mul.lo.u32 %vd0, %vd0, {0x7FEB352D};"
        " shr.u32 %vd1, %vd0, 15; xor.b32 %vd0, %vd0, %vd1;"
        f" mul.lo.u32 %vd0, %vd0, {0x846CA68B};"
        " shr.u32 %vd1, %vd0, 16; xor.b32 %vd0, %vd0, %vd1;"
        " and.b32 %vd1, %vd0, 3; setp.eq.u32 %vp, %vd1, 0; shr.u32 %vd0, %vd0, 20;"
        f" @%vp {_SLEEPS}; }}"
    )


class TritonDelays:
    """What replaces Triton's own in a process.

    more: how many bytes of shared memory a launch adds, asked for each launch; it gets those that
    the kernel asks for itself.  launches: of kernels with delays.
    """

    def __init__(self, more: Callable[[int], int]) -> None:
        self.launches = 0
        self._more = more
        self._delayed: set[str] = set()  # hashes of builds

    def install(self) -> None:
        """Call it when Triton is loaded, and before its first build."""
        from triton import knobs
        from triton.backends.nvidia.driver import CudaLauncher

        knobs.runtime.add_stages_inspection_hook = self.stages
        knobs.compilation.listener = self.built
        prepare: Callable[..., None] = CudaLauncher.__init__
        call: Callable[..., None] = CudaLauncher.__call__
        delays = self

        def prepared(self: Any, source: Any, metadata: Any) -> None:
            prepare(self, source, metadata)
            self.delayed = metadata.hash in delays._delayed

        def launch(self: Any, *given: Any) -> None:
            delays.launches += self.delayed
            call(self, *delays.given(given))

        CudaLauncher.__init__ = prepared
        CudaLauncher.__call__ = launch

    def built(
        self, *, metadata: dict[str, Any], metadata_group: dict[str, str], **_: object
    ) -> None:
        """Triton's listener: note a build that has delays, also one from its cache."""
        paths = (path for name, path in metadata_group.items() if name.endswith(".ptx"))
        if any(_SLEEPS in Path(path).read_text(encoding="utf-8") for path in paths):
            self._delayed.add(str(metadata["hash"]))

    def stages(self, *given: Any) -> tuple[str, str] | None:
        """Triton's hook: without arguments the key of these builds in its cache, and with them
        (backend, stages...) a change of the stages of a build."""
        if not given:
            return _KEY, _KEY
        stages = given[1]
        ptx: Callable[[Any, Any], str] = stages["ptx"]
        stages["ptx"] = lambda source, metadata: delayed(ptx(source, metadata))[0]
        return None

    def given(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of Triton's launcher, with more shared memory in the sixth: (warps, CTAs,
        bytes of shared memory)."""
        warps, ctas, shared, *rest = given[5]
        return (*given[:5], (warps, ctas, shared + self._more(shared), *rest), *given[6:])


def most(shared: int, room: int) -> int:
    """Bytes of dynamic shared memory that a launch of a loaded kernel of Triton's may have.

    shared: what the kernel asks for itself: Triton raises its limit only if that is much.  room:
    what the device has for a block.
    """
    return room if shared > _SMALL else _SMALL
