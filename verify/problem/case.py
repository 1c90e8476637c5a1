"""Case: one question to one kernel, as a one-line id that parses back and replays."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from verify.bundle import published
from verify.problem import Problem, ProblemError, kind_files


class CaseError(ValueError):
    """An id that does not parse; the message names the part."""


def replay_command(case: str, oracle_files: Sequence[str] = ()) -> str:
    """The shell command that judges the case of that id again, with the oracles of these files, and
    with the files of kinds that this process uses."""
    kinds = (published(str(path)) for path in kind_files.used_files())
    options = [f" --oracle {shlex.quote(file)}" for file in oracle_files]
    options += [f" --with {shlex.quote(file)}" for file in kinds]
    return f"python -m verify replay {shlex.quote(case)}{''.join(options)}"


@dataclass(frozen=True)
class Case:
    """variant: a `Declaration.ref`; config: a `Config.name`; group: the oracles that judge the same
    run; problem: the input.

    Its id needs no quoting in a shell: `triton-flash-forward:m128n64w4s2:accuracy:b=2,hq=4,...`.
    """

    variant: str
    config: str
    group: str
    problem: Problem

    @property
    def id(self) -> str:
        return ":".join((self.variant, self.config, self.group, self.problem.name))

    @staticmethod
    def parse(text: str) -> Case:
        """The case of that id; raises CaseError."""
        parts = text.strip().rsplit(":", 3)
        if len(parts) != 4 or not all(parts):
            raise CaseError(f"{text!r} is not a case id (variant:config:group:problem)")
        variant, config, group, problem = parts
        try:
            return Case(variant, config, group, Problem.parse(problem))
        except ProblemError as error:
            raise CaseError(f"{text!r}: {error}") from None
