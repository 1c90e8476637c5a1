"""What is mutated: which functions of which files, and before which kernel's judge."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.faults.fault import (
    BACKWARD_KERNELS,
    KERNEL_MASKS,
    TRITON_BACKWARD,
    TRITON_BLOCK_POINTERS,
    TRITON_COMMON,
    TRITON_DECODE,
    TRITON_DESCRIPTORS,
    TRITON_EIGHT_BITS,
    TRITON_FORWARD,
    TRITON_FP8,
    TRITON_FP8_TRANSPOSED,
    TRITON_SOFTMAX,
    TRITON_TILES,
    plant,
)
from tests.mutants.mutant import Mutant, Mutation, in_turn, sample, source
from tests.mutants.triton.operators import mutations


@dataclass(frozen=True)
class Ground:
    """Where mutants are made.

    edited: the file.  file, variant: the kernel that is judged with it.  wanted: mutants.
    hosts: functions of the file that run on the host and are mutated, too.  others: a line, or the
    first one of a block, and the variant that is judged of it and of what stands in it.
    """

    edited: str
    file: str
    variant: str
    wanted: int
    hosts: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()


GROUNDS = (
    Ground(TRITON_FORWARD, TRITON_FORWARD, "triton-flash-forward", 60),
    Ground(TRITON_TILES, TRITON_FORWARD, "triton-flash-forward", 40),
    Ground(KERNEL_MASKS, TRITON_FORWARD, "triton-flash-forward", 15, ("mask_build",)),
    Ground(
        TRITON_COMMON,
        TRITON_FORWARD,
        "triton-flash-forward",
        12,
        ("counts", "is_aligned", "steps", "head_dim_bucket"),
    ),
    Ground(TRITON_SOFTMAX, TRITON_BLOCK_POINTERS, "triton-block-pointer-forward", 25),
    Ground(
        TRITON_BLOCK_POINTERS,
        TRITON_BLOCK_POINTERS,
        "triton-block-pointer-forward",
        25,
        others=(
            ("if EIGHT:", "triton-block-pointer-fp8-forward"),
            ("if output_scale is not None:", "triton-block-pointer-fp8-forward"),
        ),
    ),
    Ground(
        TRITON_DESCRIPTORS,
        TRITON_DESCRIPTORS,
        "triton-device-descriptor-forward",
        25,
        others=tuple(
            (line, "triton-host-descriptor-forward")
            for line in (
                "def _place(steps, batch, head, row):",
                "if HOST:",
                # whose strides the other variant's descriptor holds itself
                "v_tile = _loaded(v_all, steps[2], batch, head_kv, begin, BLOCK_N, BLOCK_DV, HOST)",
            )
        ),
    ),
    Ground(
        BACKWARD_KERNELS,
        TRITON_BACKWARD,
        "triton-flash-backward",
        90,
        others=(
            ("if dq_sums is not None:", "triton-flash-backward-atomic"),
            ("if PRESCALED:", "triton-flash-backward-prescaled"),
            # which no other variant calls
            ("def _scaled(k_tile, scale_log2):", "triton-flash-backward-prescaled"),
        ),
    ),
    Ground(TRITON_DECODE, TRITON_DECODE, "triton-decode-forward", 50),
    Ground(TRITON_FP8, TRITON_FP8, "triton-fp8-forward", 30),
    Ground(TRITON_EIGHT_BITS, TRITON_FP8, "triton-fp8-forward", 30),
    Ground(TRITON_FP8_TRANSPOSED, TRITON_FP8_TRANSPOSED, "triton-fp8-transposed-forward", 35),
)


@dataclass(frozen=True)
class TritonMutant(Mutant):
    """One mutation of one ground."""

    ground: Ground

    @staticmethod
    def of(ground: Ground, mutation: Mutation) -> TritonMutant:
        """The mutant of that ground's file."""
        return TritonMutant(ground.edited, mutation, ground)

    @property
    def variant(self) -> str:
        """The variant that is judged: one that comes to the mutated line, and whose branch it is
        that is never taken."""
        text = source(self.edited)
        around = conditions(text, self.mutation.line)
        if (self.mutation.operator, self.mutation.after) != ("branch", "True"):
            around.insert(0, text.splitlines()[self.mutation.line - 1].strip())
        others = (name for condition, name in self.ground.others if condition in around)
        return next(others, self.ground.variant)

    @cached_property
    def key(self) -> str:
        """Of the function's text, the place in it and the new text."""
        made = self.mutation
        text = source(self.edited)
        begin = text.rindex(f"def {made.function}(", 0, made.start)
        end = text.find("\n\n\n", begin)
        told = (text[begin:end], str(made.start - begin), made.after)
        return hashlib.sha256("\n".join(told).encode()).hexdigest()[:8]

    def plant(self, folder: Path) -> Path:
        """Write the mutant into a folder of its own there, and return the path of its kernel."""
        place = folder / f"{Path(self.edited).stem}-{self.key}"
        return plant(place, self.ground.file, self.edited, self.mutation.applied)


def conditions(text: str, line: int) -> list[str]:
    """The first lines of the blocks around a line of Python, the innermost first."""
    lines = text.splitlines()
    indent = len(lines[line - 1]) - len(lines[line - 1].lstrip())
    found = []
    for each in reversed(lines[: line - 1]):
        less = len(each) - len(each.lstrip())
        if each.strip() and less < indent:
            indent = less
            found.append(each.strip())
    return found


@cache
def mutants(ground: Ground) -> tuple[TritonMutant, ...]:
    """The mutants of a ground, as many as wanted."""
    made = mutations(source(ground.edited), ground.hosts)
    return sample((TritonMutant.of(ground, mutation) for mutation in made), ground.wanted)


def chosen() -> list[TritonMutant]:
    """All mutants that are judged, the grounds in turn."""
    return list(in_turn([list(mutants(ground)) for ground in GROUNDS]))
