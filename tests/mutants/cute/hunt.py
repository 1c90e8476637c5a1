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

from kernels.cute import family
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
from tests.mutants.cuda.host_hunt import HostHunt, Question
from tests.mutants.cuda.mutant import CudaMutant
from tests.mutants.cute.mutant import BUILDS
from tests.mutants.mutant import source
from tests.mutants.record import Entry
from verify.problem import Problem

Built = tuple[Choice, CudaMutant | None]
"""A build of a mutant, or of the kernel as it is."""

_CONFIGS = (*kernel.CONFIGS, *kernel.CONFIGS_D64)
# Keys that no row of a sequence sees may hold anything; the empty rows of the second problem have
# their empty intervals there.
_SPOILED = (
    "b=2,sq=64,skv=200,mask=lengths.64_64.70_0",
    "b=2,sq=128,skv=200,mask=window.20.9.tl+lengths.128_128.70_0",
)
# A local variable that is read before it is set is no number that could be right by luck.
_OPTIONS = ("-ftrivial-auto-var-init=pattern",)


def questions(build: Choice) -> list[Question]:
    """Each problem once, with the schedules in turn; then one of several blocks with the others,
    and some whose unseen keys are NaN."""
    given = [_problem(build, text) for text in MASKS + SHAPES]
    count = len(SCHEDULES)
    every = [Question(build, problem, n % count) for n, problem in enumerate(given)]
    every += [Question(build, given[0], n) for n in range(1, count)]
    every += [Question(build, _problem(build, text), 0, spoiled=True) for text in _SPOILED]
    return every


def _problem(build: Choice, text: str) -> Problem:
    return Problem.parse(f"{text},d={build.head_dim},dtype={build.dtype}")


class CuteHunt(HostHunt):
    """CuTe's headers are compiled once, which takes longer than a kernel, and the mutants that are
    prepared together are compiled together, which takes little longer than one.

    A library's file is named as the kernel in it.
    """

    def __init__(self) -> None:
        super().__init__(BUILDS)
        self._made: dict[Built, Path] = {}
        self._batch: tuple[CudaMutant, ...] = ()
        self._alone: set[Built] = set()  # what is compiled by itself, as no other compiles with it
        self._count = 0  # of libraries

    @cached_property
    def _headers(self) -> Path:
        patch_headers(self.folder)
        first = self.folder / "first.h"
        first.write_text(PROGRAM, encoding="utf-8")
        _compile(self.folder, "-x", "c++-header", str(first), "-o", f"{first}.gch")
        return first

    def questions(self, build: Choice) -> list[Question]:
        return questions(build)

    def prepare(self, mutants: Sequence[CudaMutant]) -> None:
        self._batch = tuple(mutants)
        self._made = {key: library for key, library in self._made.items() if key[1] is None}
        self._alone = set()

    def code(self, library: Path) -> bytes:
        """A library of several has none that could be compared."""
        return str(library).encode()

    def __call__(self, mutant: CudaMutant) -> Entry:
        entry = super().__call__(mutant)
        self._batch = tuple(each for each in self._batch if each != mutant)
        return entry

    def library(self, build: Choice, mutant: CudaMutant | None) -> Path:
        if (build, mutant) not in self._made:
            self._make(build, mutant)
        return self._made[build, mutant]

    def _make(self, build: Choice, mutant: CudaMutant | None) -> None:
        """Compile that mutant, or the kernel as it is, together with those that are hunted next; by
        itself, if no other compiles with it."""
        behind = [each for each in self._batch if each != mutant]
        several = [each for each in (mutant, *behind) if (build, each) not in self._alone]
        while (build, mutant) not in self._made:
            if (build, mutant) in self._alone:
                several = [mutant]
            try:
                self._made |= self._compiled(build, several)
            except subprocess.CalledProcessError as error:
                if len(several) == 1:
                    raise
                refused = [each for n, each in enumerate(several) if self._place(n) in error.stderr]
                self._alone |= {(build, each) for each in refused or several}
                several = [each for each in several if (build, each) not in self._alone]

    def _compiled(self, build: Choice, several: Sequence[CudaMutant | None]) -> dict[Built, Path]:
        """The libraries of these.  Raises subprocess.CalledProcessError."""
        self._count += 1
        place = self.folder / f"several{self._count}"
        names = [self._place(n) for n in range(len(several))]
        texts = [_built(place, *each, build) for each in zip(names, several, strict=True)]
        text = "".join([f'#include "{self._headers}"\n', *texts])
        library = _library(self.folder, place, text, place / "together.so")
        named = zip(names, several, strict=True)
        return {(build, each): _linked(place, library, name) for name, each in named}

    def _place(self, number: int) -> str:
        """The folder, and the namespace, of one of those that are compiled together; no other text
        contains it."""
        return f"several{self._count}n{number}_"

    def take(self, library: Path, build: Choice, mutants: Sequence[CudaMutant]) -> None:
        """Use what `compiled_together` has made of these."""
        for name, mutant in _named(mutants).items():
            self._made[build, mutant] = _linked(self.folder, library, name)

    def verdict(self, library: Path, question: Question) -> str | None:
        choice, problem = question.build, question.problem
        loaded = ctypes.CDLL(str(library))
        entry = loaded[f"run_{library.stem}"]
        entry.restype = ctypes.c_char_p
        config = _CONFIGS[choice.config]
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
    texts = [_built(folder, name, mutant, build) for name, mutant in _named(mutants).items()]
    text = "".join([PROGRAM, *texts])
    # Few questions follow: quick to compile counts more than quick to run.
    return _library(folder, folder, text, folder / "together.so", "-Og")


def patch_headers(folder: Path) -> None:
    """CuTe's atoms as calls, in that folder."""
    headers = family.headers()
    assert headers is not None
    patch_atoms(headers / "cute" / "arch", folder / "cute" / "arch")


def _linked(folder: Path, library: Path, name: str) -> Path:
    """That library as a file which is named as a kernel in it."""
    place = folder / f"{name}.so"
    place.symlink_to(library)
    return place


def _named(mutants: Sequence[CudaMutant]) -> dict[str, CudaMutant | None]:
    """The kernel as it is and the mutants, by their names in a library."""
    return {"right": None, **{f"mutant{n}": mutant for n, mutant in enumerate(mutants)}}


def _built(place: Path, name: str, mutant: CudaMutant | None, choice: Choice) -> str:
    """The program of one build, whose sources are copied there."""
    launch = kernel.launch(_CONFIGS[choice.config], choice.dtype, choice.head_dim, "")
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
    subprocess.run(command, check=True, capture_output=True, text=True)
