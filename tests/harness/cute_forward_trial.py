"""Trials of the CuTe forward on the CPU: oracles with their further launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kernels.cute import flash_forward as kernel
from tests.harness.cute_host import Program
from tests.harness.fake_trials import OK, trial_of
from verify.judging.launch import Launch
from verify.judging.trial import Trial


class HostTrial(Trial):
    """A trial whose forward is a program's run."""

    program: Program

    @staticmethod
    def of(program: Program, text: str) -> HostTrial:
        """The trial of that problem."""
        variant = kernel.VARIANT
        plain = trial_of(
            program.problem(text),
            numerics=variant.numerics,
            contract=variant.contract,
            configs=(program.config,),
            support=variant.support,
        )
        made = HostTrial(
            plain.declaration, program.config, plain.problem, plain.cell, plain.arena, "sm_90"
        )
        made.program = program
        return made

    def _launch(
        self, entry: str, poison: str, given: Sequence[Mapping[str, Tensor]], way: str = ""
    ) -> Launch:
        assert not way
        (inputs,) = given
        ran = self.program.run(self.problem, given=inputs)
        return Launch(OK, poison, {"out": ran.out.contiguous(), "lse": ran.lse})
