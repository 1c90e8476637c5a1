"""The hunt of a mutant of the CuTe forward, whose source a host compiler reads with CuTe's own
headers."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path
from typing import Self

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
    """CuTe's headers are compiled once, which takes longer than a kernel."""

    def __init__(self) -> None:
        super().__init__(BUILDS)

    def __enter__(self) -> Self:
        super().__enter__()
        headers = kernel.headers()
        assert headers is not None
        patch_atoms(headers / "cute" / "arch", self.folder / "cute" / "arch")
        first = self.folder / "first.h"
        first.write_text(PROGRAM, encoding="utf-8")
        self._compile("-x", "c++-header", str(first), "-o", f"{first}.gch")
        return self

    def _compile(self, *arguments: str) -> None:
        folders = [f"-I{folder}" for folder in include_folders(self.folder)]
        command = ["g++", *compiler_options(), *_OPTIONS, *folders, *arguments]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    def questions(self, build: Choice) -> list[Question]:
        return questions(build)

    def library(self, build: Choice, mutant: CudaMutant | None) -> Path:
        place = self.folder / ("right" if mutant is None else "mutant") / words(build)
        shutil.rmtree(place, ignore_errors=True)
        text = _built(place, build)
        if mutant is not None:
            changed = mutant.mutation.applied(source(mutant.edited))
            copy = place / _NAME / Path(mutant.edited).name
            copy.write_text(changed.replace("#pragma once\n", "\n"), encoding="utf-8")
        program = place / "program.cpp"
        program.write_text(f'#include "first.h"\n{text}', encoding="utf-8")
        library = place / "program.so"
        self._compile("-shared", str(program), "-o", str(library))
        return library

    def verdict(self, library: Path, question: Question) -> str | None:
        choice, problem = question.build, question.problem
        loaded = ctypes.CDLL(str(library))
        entry = loaded[f"run_{_NAME}"]
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


def _built(place: Path, choice: Choice) -> str:
    """The program of one build, whose sources are copied there."""
    launch = kernel.launch(kernel.CONFIGS[choice.config], choice.dtype, choice.head_dim, "")
    return build(place, _NAME, launch, {})
