"""The hunt of a mutant of the raw-PTX kernels, launched by their own `forward`."""

from __future__ import annotations

from pathlib import Path
from typing import Self
from unittest.mock import patch

from kernels.cuda import family
from kernels.cuda.family import Launch
from kernels.ptx.tiling import ROOM
from tests.harness.host_library import compiled
from tests.harness.ptx_cases import problems
from tests.harness.ptx_host import (
    MODULES,
    SCHEDULES,
    Choice,
    Host,
    convict,
    macros,
    part,
    run,
    written,
)
from tests.mutants.cuda.host_hunt import HostHunt, Question, words
from tests.mutants.cuda.mutant import BUILDS, CudaMutant
from tests.mutants.mutant import source

# An index outside of an array with a known length ends the process; a local variable that is read
# before it is set is no number that could be right by luck.
_OPTIONS = (
    "-w",
    "-fsanitize=bounds",
    "-fsanitize-undefined-trap-on-error",
    "-ftrivial-auto-var-init=pattern",
)


def questions(build: Choice) -> list[Question]:
    """Each problem of a build once, with the schedules in turn, then the first with the others, of
    one head alone where no table of rows says more; that of scale 0, which has waits of its own,
    with copies that land late; each small one again where some keys are seen by no row."""
    given = list(problems(build))
    count = len(SCHEDULES)
    every = [Question(build, problem, n % count) for n, problem in enumerate(given)]
    first = given[0]
    if build.kind != "table":
        first = first.but(batch=1, heads_q=1, heads_kv=1)
    every += [Question(build, first, n) for n in range(1, count)]
    late = next(n for n, schedule in enumerate(SCHEDULES) if schedule.late)
    every += [Question(build, problem, late) for problem in given if problem.scale == 0]
    if build.kind != "full":
        every += [Question(build, p, 0, spoiled=True) for p in given if p.batch == 1]
    return every


class CudaHunt(HostHunt):
    """While it is open, `forward` of the raw-PTX kernels runs on the CPU."""

    def __init__(self) -> None:
        super().__init__(BUILDS)
        self._current: list[Host] = []

    def __enter__(self) -> Self:
        super().__enter__()
        places = (
            ("loaded", lambda source, arch: self._current[0]),
            ("device_arch", lambda device: "host"),
            ("shared_room", lambda device: ROOM),
            ("launch", lambda kernel, *rest: kernel.launch(*rest)),
        )
        for name, instead in places:
            self._open.enter_context(patch.object(family, name, instead))
        return self

    def questions(self, build: Choice) -> list[Question]:
        return questions(build)

    def library(self, build: Choice, mutant: CudaMutant | None) -> Path:
        """Compile a build of a mutant, or of the kernel as it is.  Raises
        subprocess.CalledProcessError."""
        made = launch_of(build).source

        def edit(text: str) -> str:
            assert mutant is not None
            whole = source(mutant.edited)
            assert text.count(part(whole)) == 1
            return text.replace(part(whole), part(mutant.mutation.applied(whole)))

        # A library is known by its path: each build has a folder of its own.
        place = self.folder / ("right" if mutant is None else "mutant") / words(build)
        place.mkdir(parents=True, exist_ok=True)
        kernel = written(made, place, edit if mutant is not None else str)
        return compiled(kernel, made.entry, macros(made, build.arch), _OPTIONS, quiet=True)

    def verdict(self, library: Path, question: Question) -> str | None:
        """What one question finds in this process: a short text, or None."""
        build = question.build
        host = Host(launch_of(build).source, self.folder, library=library)
        host.schedule = SCHEDULES[question.schedule]
        self._current[:] = [host]
        config = build.build[0]
        try:
            outputs = run(build.variant, question.problem, config, spoiled=question.spoiled)
        except AssertionError as error:
            return (str(error) or "written outside").splitlines()[0]
        return convict(build.variant, question.problem, config, *outputs)


def launch_of(build: Choice) -> Launch:
    """How a build is compiled and launched."""
    return MODULES[build.name].TILING.launch(*build.build, narrow=build.narrow)
