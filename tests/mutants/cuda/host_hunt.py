"""The hunt of a mutant of CUDA C++: builds of it run on the CPU until one is convicted.

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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self
from unittest.mock import patch

import torch

from tests.harness import ptx_host
from tests.harness.ptx_host import Choice
from tests.mutants.cuda.mutant import CudaMutant
from tests.mutants.record import BROKEN, KILLED, SAME, SURVIVED, Entry
from tests.mutants.truths import Memory
from verify.problem import Problem

EXECUTION = "execution"
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Question:
    """A build, a problem, the number of a schedule, and whether what no row sees is NaN."""

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
        name, config, dtype, head_dim, kind, storage, *arch = place.split("/")
        build = Choice(name, int(config), dtype, int(head_dim), kind, storage, *map(int, arch))
        return Question(build, Problem.parse(problem), int(how[0]), how[1:] == "n")


@dataclass
class HostHunt:
    """Hunts the mutants of one collection of sources.  A context manager.

    builds: by which mutants are tried.  seconds: of CPU time for all questions to one build.
    convicting: how many mutants of a file a build has convicted: these are asked first.
    """

    builds: tuple[Choice, ...]
    seconds: int = 60
    convicting: dict[str, Counter[Choice]] = field(default_factory=dict)
    _right: dict[Choice, bytes] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        torch.set_num_threads(1)
        place = TemporaryDirectory(prefix="mutants-")
        self.folder = Path(self._open.enter_context(place))
        truths = Memory(ptx_host.compute_truth)
        self._open.enter_context(patch.object(ptx_host, "compute_truth", truths))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def questions(self, build: Choice) -> list[Question]:
        """All that a build is asked, in order."""
        raise NotImplementedError

    def library(self, build: Choice, mutant: CudaMutant | None) -> Path:
        """Compile a build of a mutant, or of the kernel as it is.  Raises
        subprocess.CalledProcessError."""
        raise NotImplementedError

    def verdict(self, library: Path, question: Question) -> str | None:
        """What one question finds in this process: a short text, or None."""
        raise NotImplementedError

    def learn(self, mutants: Iterable[CudaMutant], entries: Mapping[str, Entry]) -> None:
        """Count the convictions of an earlier hunt."""
        for mutant in mutants:
            entry = entries.get(mutant.id)
            if entry is not None and entry.how == KILLED:
                build = Question.parse(entry.by.partition(":")[2]).build
                self.convicting.setdefault(mutant.edited, Counter())[build] += 1

    def prepare(self, mutants: Sequence[CudaMutant]) -> None:
        """These are hunted next, one after the other."""

    def code(self, library: Path) -> bytes:
        """What tells a library from that of the right kernel."""
        return library.read_bytes()

    def __call__(self, mutant: CudaMutant) -> Entry:
        """Ask one build after the other until one is convicted.

        A build whose machine code is that of the right kernel is not asked.
        """
        begun = time.monotonic()
        asked = 0
        how = SAME
        counts = self.convicting.setdefault(mutant.edited, Counter())
        for build in sorted(self.builds, key=lambda build: -counts[build]):
            right = self.right(build)
            try:
                library = self.library(build, mutant)
            except subprocess.CalledProcessError:
                return Entry(BROKEN, "", asked, time.monotonic() - begun)
            if self.code(library) == right:
                continue
            how = SURVIVED
            every = self.questions(build)
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
            for question in self.questions(build):
                said = self.verdict(library, question)
                assert said is None, f"{question.id}: {said} of the kernel as it is"
            self._right[build] = self.code(library)
        return self._right[build]

    def again(self, mutant: CudaMutant, entry: Entry) -> bool:
        """Whether a mutant is convicted again by the question on record, for the same reason."""
        said, _, text = entry.by.partition(":")
        question = Question.parse(text)
        return self.answer(self.library(question.build, mutant), [question]) == (0, said)

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
        resource.setrlimit(resource.RLIMIT_CPU, (self.seconds, self.seconds))
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
    parts = [build.name, build.config, build.dtype, build.head_dim, build.kind, build.storage]
    return "/".join(map(str, [*parts, build.arch] if build.arch else parts))
