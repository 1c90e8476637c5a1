"""A softcap that coarse arithmetic hides contradicts no declaration."""

from __future__ import annotations

import torch

from tests.harness.declared import flat_numerics
from tests.harness.fake_trials import acquitted, convicted
from tests.harness.in_process import Kernel as Direct
from tests.harness.in_process import declared
from tests.harness.in_process import trial as asked
from verify.oracles.contract import oracle as contract

torch.set_num_threads(1)


COARSE = flat_numerics(exp="ex2.approx.ftz.bf16", block_n=16, prescale="sqrt")


def test_a_softcap_that_coarse_arithmetic_hides_contradicts_nothing() -> None:
    """Its bound holds the declared form and another one."""
    declaration = declared(numerics=COARSE, dtypes=("bfloat16",))
    for case in (
        problem for problem in contract.asks(declaration, "bfloat16") if problem.score_mod
    ):
        right, uncapped = (
            contract.judge(asked(Direct(cap=cap), case, declaration))
            for cap in (Direct().cap, lambda s, c: s)
        )
        assert acquitted(right)
        assert (
            right.observed["softcap"] == "undecided"
            if case.mask.name == "full"
            else "softcap and mask" in right.observed
        )
        convicted(uncapped, "softcap")
