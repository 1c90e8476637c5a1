"""The hunt of a mutant of the CuTe forward, whose source a host compiler reads with CuTe's own
headers."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from kernels.cute import flash_forward as kernel
from tests.harness.cute_cases import MASKS, SHAPES
from tests.harness.cute_host import (
    ORDERS,
    PROGRAM,
    Program,
    build,
    compiler_options,
    include_folders,
    patch_atoms,
)
from tests.harness.ptx_host import SCHEDULES, Choice, convict
from tests.mutants.cuda.host_hunt import HostHunt, Question, words
from tests.mutants.cuda.mutant import CudaMutant
from tests.mutants.cute.mutant import BUILDS
from tests.mutants.mutant import source
from verify.problem import Problem

_NAME = "built"
# Keys that no row of a sequence sees may hold anything.
_SPOILED = "b=2,sq=64,skv=200,mask=lengths.64_64.70_0"
# A local variable that is read before it is set is no number that could be right by luck.
_OPTIONS = ("-ftrivial-auto-var-init=pattern",)


def questions(build: Choice) -> list[Question]:
    """Each problem once, with the schedules in turn; then one of several blocks with the others,
    and one whose unseen keys are NaN."""
    given = [_problem(build, text) for text in MASKS + SHAPES]
    count = len(SCHEDULES)
    every = [Question(build, problem, n % count) for n, problem in enumerate(given)]
    every += [Question(build, given[0], n) for n in range(1, count)]
    every.append(Question(build, _problem(build, _SPOILED), 0, spoiled=True))
    return every


def _problem(build: Choice, text: str) -> Problem:
    return Problem.parse(f"{text},d={build.head_dim},dtype={build.dtype}")


class CuteHunt(HostHunt):
    """CuTe's headers are compiled once, which takes longer than a kernel.

    A library's file is named as the kernel in it; see `compiled_together` for several in one.
    """

    def __init__(self) -> None:
        super().__init__(BUILDS)
        self._made: dict[tuple[Choice, CudaMutant | None], Path] = {}

    @cached_property
    def _headers(self) -> Path:
        patch_headers(self.folder)
        first = self.folder / "first.h"
        first.write_text(PROGRAM, encoding="utf-8")
        _compile(self.folder, "-x", "c++-header", str(first), "-o", f"{first}.gch")
        return first

    def questions(self, build: Choice) -> list[Question]:
        return questions(build)

    def library(self, build: Choice, mutant: CudaMutant | None) -> Path:
        if (build, mutant) in self._made:
            return self._made[build, mutant]
        place = self.folder / ("right" if mutant is None else "mutant") / words(build)
        shutil.rmtree(place, ignore_errors=True)
        program = f'#include "{self._headers}"\n{_built(place, _NAME, build, mutant)}'
        return _library(self.folder, place, program, place / f"{_NAME}.so")

    def take(self, library: Path, build: Choice, mutants: Sequence[CudaMutant]) -> None:
        """Use what `compiled_together` has made of these."""
        for name, mutant in _named(mutants).items():
            place = self.folder / f"{name}.so"
            place.symlink_to(library)
            self._made[build, mutant] = place

    def verdict(self, library: Path, question: Question) -> str | None:
        choice, problem = question.build, question.problem
        loaded = ctypes.CDLL(str(library))
        entry = loaded[f"run_{library.stem}"]
        entry.restype = ctypes.c_char_p
        config = kernel.CONFIGS[choice.config]
        program = Program(loaded, entry, config, choice.dtype, choice.head_dim)
        hidden = math.nan if question.spoiled else None
        order = vars(SCHEDULES[question.schedule])
        assert order in ORDERS
        try:
            ran = program.run(problem, hidden=hidden, **order)
        except RuntimeError as error:
            return str(error)
        if ran.conflicts != (0, 0) and problem.batch == 1:
            return "bank conflicts"
        return convict(kernel.VARIANT, problem, config, ran.out, ran.lse, "sm_90")


def compiled_together(folder: Path, build: Choice, mutants: Sequence[CudaMutant]) -> Path:
    """One library of a build of the kernel as it is and of each mutant: most templates of CuTe's
    are made once for all of them, which takes longer than all else."""
    shutil.rmtree(folder, ignore_errors=True)  # what a compilation that failed has left
    patch_headers(folder)
    texts = [_built(folder, name, build, mutant) for name, mutant in _named(mutants).items()]
    text = "".join([PROGRAM, *texts])
    # Few questions follow: quick to compile counts more than quick to run.
    return _library(folder, folder, text, folder / "together.so", "-Og")


def patch_headers(folder: Path) -> None:
    """CuTe's atoms as calls, in that folder."""
    headers = kernel.headers()
    assert headers is not None
    patch_atoms(headers / "cute" / "arch", folder / "cute" / "arch")


def _named(mutants: Sequence[CudaMutant]) -> dict[str, CudaMutant | None]:
    """The kernel as it is and the mutants, by their names in a library."""
    return {"right": None, **{f"mutant{n}": mutant for n, mutant in enumerate(mutants)}}


def _built(place: Path, name: str, choice: Choice, mutant: CudaMutant | None) -> str:
    """The program of one build, whose sources are copied there."""
    launch = kernel.launch(kernel.CONFIGS[choice.config], choice.dtype, choice.head_dim, "")
    text = build(place, name, launch, {})
    if mutant is not None:
        changed = mutant.mutation.applied(source(mutant.edited))
        copy = place / name / Path(mutant.edited).name
        copy.write_text(changed.replace("#pragma once\n", "\n"), encoding="utf-8")
    return text


def _library(headers: Path, place: Path, text: str, library: Path, *options: str) -> Path:
    program = place / "program.cpp"
    program.write_text(text, encoding="utf-8")
    _compile(headers, *options, "-shared", str(program), "-o", str(library))
    return library


def _compile(headers: Path, *arguments: str) -> None:
    folders = [f"-I{folder}" for folder in include_folders(headers)]
    command = ["g++", *compiler_options(), *_OPTIONS, *folders, *arguments]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
