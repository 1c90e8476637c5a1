"""Trials of the forwards for Hopper on the CPU: oracles with their further launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from tests.harness.cute_hopper_host import Program
from tests.harness.cute_host import ORDERS, HostError
from tests.harness.cute_verdicts import EXECUTION, FORWARD, MEMORY
from tests.harness.fake_trials import OK, trial_of
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.problem.inputs import Inputs

# The kernels declare `finite`, and keep more: V becomes zero where no row of a tile sees a key.
MASKED_VALUES = "padding"


class HopperTrial(Trial):
    """A trial whose forward is a program's run.

    order: of warps and copies, one of `ORDERS`.
    """

    program: Program
    order: Mapping[str, bool]

    @staticmethod
    def of(program: Program, text: str, order: Mapping[str, bool]) -> HopperTrial:
        """The trial of that problem."""
        variant = program.variant
        plain = trial_of(
            program.problem(text),
            numerics=variant.numerics,
            contract=replace(variant.contract, masked_values=MASKED_VALUES),
            configs=(program.config,),
            support=variant.support,
        )
        made = HopperTrial(
            plain.declaration, program.config, plain.problem, plain.cell, plain.arena, "sm_90"
        )
        made.program = program
        made.order = order
        return made

    def _launch(
        self, entry: str, poison: str, given: Sequence[Mapping[str, Tensor]], way: str = ""
    ) -> Launch:
        assert entry == "forward"
        assert not way
        (inputs,) = given
        chosen = Inputs(inputs["q"], inputs["k"], inputs["v"])
        ran = self.program.run(self.problem, chosen, **self.order)
        return Launch(OK, poison, {"out": ran.out.contiguous(), "lse": ran.lse})


def convicting(program: Program, text: str) -> str:
    """The first oracle that convicts the program of that problem, in the first order that it does;
    "" if it passes in all.

    MEMORY is a write to a place that is no result's, EXECUTION a run that comes to no end or whose
    barriers are not what they are taken for.
    """
    for order in ORDERS:
        trial = HopperTrial.of(program, text, order)
        try:
            for oracle in FORWARD:
                if oracle.concerns(trial) and oracle.judge(trial).finding is not None:
                    return oracle.name
        except HostError as error:
            return MEMORY if "elements written" in str(error) else EXECUTION
    return ""
