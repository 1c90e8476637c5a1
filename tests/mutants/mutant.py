"""What is mutated: which functions of which files, and before which kernel's judge."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

from tests.faults.fault import (
    BACKWARD_KERNELS,
    KERNEL_MASKS,
    TRITON_BACKWARD,
    TRITON_BLOCK_POINTERS,
    TRITON_COMMON,
    TRITON_DECODE,
    TRITON_DESCRIPTORS,
    TRITON_FORWARD,
    TRITON_FP8,
    TRITON_FP8_TRANSPOSED,
    TRITON_SOFTMAX,
    TRITON_TILES,
    plant,
)
from tests.mutants.operators import Mutation, mutations
from verify.cell.process import ROOT

T = TypeVar("T")


@dataclass(frozen=True)
class Ground:
    """Where mutants are made.

    edited: the file.  file, variant: the kernel that is judged with it.  wanted: mutants.
    hosts: functions of the file that run on the host and are mutated, too.  others: the first line
    of a block, and the variant that is judged of what stands in it.
    """

    edited: str
    file: str
    variant: str
    wanted: int
    hosts: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()

    def plant(self, mutation: Mutation, folder: Path) -> Path:
        """Write the mutant into a folder of its own there, and return the path of its kernel."""
        place = folder / f"{Path(self.edited).stem}-{key(self, mutation)}"
        return plant(place, self.file, self.edited, mutation.applied)


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
    Ground(TRITON_BLOCK_POINTERS, TRITON_BLOCK_POINTERS, "triton-block-pointer-forward", 25),
    Ground(
        TRITON_DESCRIPTORS,
        TRITON_DESCRIPTORS,
        "triton-device-descriptor-forward",
        25,
        others=(("def _place(steps, batch, head, row):", "triton-host-descriptor-forward"),),
    ),
    Ground(
        BACKWARD_KERNELS,
        TRITON_BACKWARD,
        "triton-flash-backward",
        90,
        others=(
            ("if dq_sums is not None:", "triton-flash-backward-atomic"),
            ("if PRESCALED:", "triton-flash-backward-prescaled"),
        ),
    ),
    Ground(TRITON_DECODE, TRITON_DECODE, "triton-decode-forward", 50),
    Ground(TRITON_FP8, TRITON_FP8, "triton-fp8-forward", 45),
    Ground(TRITON_FP8_TRANSPOSED, TRITON_FP8_TRANSPOSED, "triton-fp8-transposed-forward", 35),
)


@dataclass(frozen=True)
class Mutant:
    """One mutation of one ground."""

    ground: Ground
    mutation: Mutation

    @property
    def edited(self) -> str:
        """The mutated file."""
        return self.ground.edited

    @property
    def variant(self) -> str:
        """The variant that is judged: one that comes to the mutated line."""
        around = conditions(source(self.edited), self.mutation.line)
        others = (name for condition, name in self.ground.others if condition in around)
        return next(others, self.ground.variant)

    @cached_property
    def id(self) -> str:
        """file:function:operator:key; another one once the function has changed."""
        made = self.mutation
        place = f"{Path(self.ground.edited).stem}:{made.function}"
        return f"{place}:{made.operator}:{key(self.ground, made)}"

    @cached_property
    def before(self) -> str:
        """What stands there, in one line."""
        text = source(self.ground.edited)
        return one_line(text[self.mutation.start : self.mutation.end])

    @cached_property
    def after(self) -> str:
        """What the mutant has, in one line."""
        return one_line(self.mutation.after)


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


def key(ground: Ground, mutation: Mutation) -> str:
    """Of the mutated function's text and the edit."""
    text = source(ground.edited)
    begin = text.rindex(f"def {mutation.function}(", 0, mutation.start)
    end = text.find("\n\n\n", begin)
    told = (text[begin:end], str(mutation.start - begin), mutation.after)
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:8]


def one_line(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


@cache
def source(file: str) -> str:
    """The text of a file of the collection."""
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def mutants(ground: Ground) -> tuple[Mutant, ...]:
    """The mutants of a ground: the operators in turn, of each in an order that depends on
    the text alone, until there are as many as wanted."""
    by_operator: dict[str, list[Mutant]] = {}
    for mutation in mutations(source(ground.edited), ground.hosts):
        by_operator.setdefault(mutation.operator, []).append(Mutant(ground, mutation))
    queues = [sorted(queue, key=lambda mutant: mutant.id[-8:]) for queue in by_operator.values()]
    return tuple(in_turn(queues))[: ground.wanted]


def in_turn(queues: list[list[T]]) -> Iterator[T]:
    """The first of each queue, then the second of each..."""
    for number in range(max(map(len, queues), default=0)):
        yield from (queue[number] for queue in queues if number < len(queue))


def chosen() -> list[Mutant]:
    """All mutants that are judged, the grounds in turn."""
    return list(in_turn([list(mutants(ground)) for ground in GROUNDS]))
