"""Trials of the CuTe backward on the CPU: oracles with their further launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tests.harness.cute_backward_host import Program
from tests.harness.fake_trials import OK, trial_of
from verify.judging.launch import Launch
from verify.judging.trial import Trial


class HostTrial(Trial):
    """A trial whose backward is a program's run, behind the exact O and LSE, rounded."""

    program: Program

    @staticmethod
    def of(program: Program, text: str) -> HostTrial:
        """The trial of that problem."""
        problem, chosen = program.problem(text), program.chosen
        variant = chosen.variant
        plain = trial_of(
            problem,
            gradients=variant.gradients,
            contract=variant.contract,
            configs=(chosen.config,),
            support=variant.support,
        )
        made = HostTrial(
            plain.declaration, chosen.config, problem, plain.cell, plain.arena, "sm_90", "backward"
        )
        made.program = program
        saved = program.saved(problem)
        made.launches["saved"] = Launch(OK, "nan", {"out": saved.out, "lse": saved.lse})
        return made

    def _launch(self, entry: str, poison: str, given: Sequence[Mapping[str, Tensor]]) -> Launch:
        (inputs,) = given
        saved = self.program.saved(self.problem)
        ran = self.program.run(self.problem, saved, given=inputs)
        return Launch(OK, poison, {name: x.contiguous() for name, x in ran.gradients.items()})
