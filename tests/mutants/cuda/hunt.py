"""The hunt of a CUDA mutant: builds of it run on the CPU until one is convicted.

A question is a build, a problem, and the order in which warps run and copies land.  A mutant runs
in a process of its own, which it may crash, or hold until its time is over.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import re
import resource
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from unittest.mock import patch

import torch

from kernels.cuda import family
from kernels.cuda.family import Launch
from kernels.ptx.tiling import ROOM
from tests.harness import ptx_host
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
from tests.mutants.cuda.mutant import BUILDS, CudaMutant, chosen
from tests.mutants.mutant import source
from tests.mutants.record import BROKEN, KILLED, SAME, SURVIVED, Entry
from tests.mutants.truths import Memory
from verify.problem import Problem

EXECUTION = "execution"
# An index outside of an array with a known length ends the process.
_OPTIONS = ("-w", "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error")
_SECONDS = 60  # of CPU time for all questions to one build
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Question:
    """A build, a problem, the number of a schedule, and whether what no row sees is NaN
    (`ptx_host.inputs_of`)."""

    build: Choice
    problem: Problem
    schedule: int
    spoiled: bool = False

    @property
    def id(self) -> str:
        """One line that parses back."""
        how = f"{self.schedule}{'n' * self.spoiled}"
        return f"{words(self.build)}:{how}:{self.problem.name}"

    @staticmethod
    def parse(text: str) -> Question:
        """The question of that id.  Raises ValueError."""
        place, how, problem = text.split(":", 2)
        name, config, dtype, head_dim, kind, storage = place.split("/")
        build = Choice(name, int(config), dtype, int(head_dim), kind, storage)
        return Question(build, Problem.parse(problem), int(how[0]), how[1:] == "n")


def questions(build: Choice) -> list[Question]:
    """Each problem of a build once, with the schedules in turn, then the first with the others, of
    one head alone where no table of rows says more; each small one again where some keys are seen
    by no row."""
    given = list(problems(build))
    count = len(SCHEDULES)
    every = [Question(build, problem, n % count) for n, problem in enumerate(given)]
    first = given[0]
    if build.kind != "table":
        first = first.but(batch=1, heads_q=1, heads_kv=1)
    every += [Question(build, first, n) for n in range(1, count)]
    if build.kind != "full":
        every += [Question(build, p, 0, spoiled=True) for p in given if p.batch == 1]
    return every


@dataclass
class CudaHunt:
    """Hunts CUDA mutants.  A context manager, while which `forward` of the raw-PTX kernels runs on
    the CPU.

    convicting: how many mutants of a header a build has convicted: these are asked first.
    """

    convicting: dict[str, Counter[Choice]] = field(default_factory=dict)
    _right: dict[Choice, bytes] = field(default_factory=dict)
    _current: list[Host] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> CudaHunt:
        torch.set_num_threads(1)
        self.folder = Path(self._open.enter_context(TemporaryDirectory(prefix="cuda-mutants-")))
        places = (
            (family, "loaded", lambda source, arch: self._current[0]),
            (family, "device_arch", lambda device: "host"),
            (family, "shared_room", lambda device: ROOM),
            (family, "launch", lambda kernel, *rest: kernel.launch(*rest)),
            (ptx_host, "compute_truth", Memory(ptx_host.compute_truth)),
        )
        for module, name, instead in places:
            self._open.enter_context(patch.object(module, name, instead))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def learn(self, entries: Mapping[str, Entry]) -> None:
        """Count the convictions of an earlier hunt."""
        for mutant in chosen():
            entry = entries.get(mutant.id)
            if entry is not None and entry.how == KILLED:
                build = Question.parse(entry.by.partition(":")[2]).build
                self.convicting.setdefault(mutant.edited, Counter())[build] += 1

    def __call__(self, mutant: CudaMutant) -> Entry:
        """Ask one build after the other until one is convicted.

        A build whose machine code is that of the right kernel is not asked.
        """
        begun = time.monotonic()
        asked = 0
        how = SAME
        counts = self.convicting.setdefault(mutant.edited, Counter())
        for build in sorted(BUILDS, key=lambda build: -counts[build]):
            right = self.right(build)
            try:
                library = self.library(build, mutant)
            except subprocess.CalledProcessError:
                return Entry(BROKEN, "", asked, time.monotonic() - begun)
            if library.read_bytes() == right:
                continue
            how = SURVIVED
            every = questions(build)
            found = self.answer(library, every)
            asked += len(every) if found is None else found[0] + 1
            if found is not None:
                counts[build] += 1
                by = f"{found[1]}:{every[found[0]].id}"
                return Entry(KILLED, by, asked, time.monotonic() - begun)
        return Entry(how, "", asked, time.monotonic() - begun)

    def right(self, build: Choice) -> bytes:
        """The library of the kernel as it is.  Raises AssertionError if a question convicts it."""
        if build not in self._right:
            library = self.library(build, None)
            for question in questions(build):
                said = self.verdict(library, question)
                assert said is None, f"{question.id}: {said} of the kernel as it is"
            self._right[build] = library.read_bytes()
        return self._right[build]

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
        return compiled(kernel, made.entry, macros(made), _OPTIONS, quiet=True)

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
            return str(error).splitlines()[0] if str(error) else "written outside"
        return convict(build.variant, question.problem, config, *outputs)

    def answer(self, library: Path, every: list[Question]) -> tuple[int, str] | None:
        """The first question that convicts a library, by its place, and what it says; asked in
        another process."""
        ours, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=self._ask, args=(library, every, theirs))
        process.start()
        theirs.close()
        last = -1
        found = None
        try:
            while True:
                last, said, over = ours.recv()
                found = (last, said) if said is not None else None
                if over:
                    break
        except EOFError:  # it has crashed, or its time is over
            found = last + 1, EXECUTION
        process.join()
        ours.close()
        return found

    def _ask(self, library: Path, every: list[Question], answers: Connection) -> None:
        faulthandler.disable()  # a crash is an answer
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for n, question in enumerate(every):
            said = self.verdict(library, question)
            over = said is not None or n == len(every) - 1
            answers.send((n, None if said is None else short(said), over))
            if over:
                return


def short(said: str) -> str:
    """A verdict without its numbers."""
    return re.split(r":| \(", said)[0]


def words(build: Choice) -> str:
    """A build's parts in one word."""
    parts = (build.name, build.config, build.dtype, build.head_dim, build.kind, build.storage)
    return "/".join(map(str, parts))


def launch_of(build: Choice) -> Launch:
    """How a build is compiled and launched."""
    return MODULES[build.name].TILING.launch(*build.build, narrow=build.narrow)
