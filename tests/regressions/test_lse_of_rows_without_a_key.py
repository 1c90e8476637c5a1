"""Rows without a key say nothing of how an LSE is computed."""

from __future__ import annotations

import torch

from references.masks import Causal
from tests.harness.declared import flat_numerics
from tests.harness.fake_trials import acquitted, convicted
from tests.harness.in_process import Kernel as Direct
from tests.harness.in_process import declared
from tests.harness.in_process import trial as asked
from tests.harness.reference_kernel import LOG2_E
from verify.oracles.contract import oracle as contract

torch.set_num_threads(1)


def test_rows_without_a_key_say_nothing_of_the_lse() -> None:
    """A kernel that has causal masks alone is asked for its LSE under one, beside rows that see
    nothing."""
    declaration = declared(
        numerics=flat_numerics(exp="vexp", block_n=0), masks=("causal",), score_mods=()
    )
    cases = [
        case
        for case in contract.asks(declaration, "float32")
        if case.mask == Causal() and case.seqlen_q > case.seqlen_kv
    ]
    assert cases
    base_2 = Direct(lse=lambda natural, top, total, scale: natural * LOG2_E)
    for case in cases:
        right = contract.judge(asked(Direct(), case, declaration))
        assert acquitted(right)
        assert right.observed["LSE"] == "natural"
        convicted(
            contract.judge(asked(base_2, case, declaration)), "declares LSE natural, is base 2"
        )
