"""What other suites' rules catch: the committed numbers are measured again, and stand beside the
certificates."""

from __future__ import annotations

import pytest
import torch

from tests.faults import rival_power as measuring
from tests.faults.rivals import RIVALS
from tests.meta.report.test_report_power import ONE, report
from tests.properties import tier
from verify.document import Table
from verify.report import power_plot, rival_power
from verify.report.beside import Beside
from verify.report.power import FAULTS
from verify.report.sections.power import section

BY_NAME = {rival.name: rival for rival in RIVALS}
SOME = [
    ("cuDNN 2e-2", "float16", "lse"),
    ("FlashAttention 2x", "bfloat16", "scale"),
    ("PyTorch SDPA", "float16", "dv"),
    ("Triton tutorial 1e-2", "float16", "ds_pair"),
    ("FlashAttention 2x", "float16", "delta"),
]


def test_every_rule_dtype_and_class_is_measured() -> None:
    assert rival_power.RIVALS.keys() == BY_NAME.keys() == power_plot.RULES.keys()
    for by_dtype in rival_power.RIVALS.values():
        assert tuple(by_dtype) == measuring.DTYPES
        for by_fault in by_dtype.values():
            assert by_fault.keys() == FAULTS.keys()


@pytest.mark.parametrize("of", tier.thorough(SOME, keep=2), ids=str)
def test_the_committed_strength_is_what_the_rule_catches(of: tuple[str, str, str]) -> None:
    """One and a half times it is caught and two thirds of it are not, whatever the CPU's last
    places."""
    torch.set_num_threads(1)
    rule, dtype, fault = of
    rival, e = BY_NAME[rule], rival_power.RIVALS[rule][dtype][fault]
    assert e is not None
    problems = measuring.asked(rival, dtype)
    assert problems

    def caught(strength: float) -> bool:
        signs = (1,) if fault in measuring.ONE_SIGN else (1, -1)
        return all(
            any(
                not measuring.accepted(
                    rival, one, measuring.emulated(one.problem, one.given, fault, sign * strength)
                )
                for one in problems
            )
            for sign in signs
        )

    assert caught(1.5 * e)
    assert not caught(e / 1.5)


def test_rules_stand_beside_the_certificates() -> None:
    found = report((ONE, {"power_scale": 3e-5, "power_lse": 2e-6}, {}))
    shown = section(found, Beside())
    assert shown is not None
    compared, _ = (block for block in shown.blocks if isinstance(block, Table))
    assert [row[0] for row in compared.rows] == [FAULTS["scale"], FAULTS["lse"]]
    image = power_plot.power_plot(found)
    assert image is not None
    assert "this campaign, float16" in image
    assert all(rule in image for rule in power_plot.RULES)
    assert power_plot.power_plot(report((ONE, {}, {}))) is None
