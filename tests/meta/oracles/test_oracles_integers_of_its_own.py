"""Kernels that round Q and K to integers themselves, on trial: right ones pass every oracle that is
asked, wrong ones are convicted, and oracles whose premises are broken say so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from references.masks import Causal, Full
from tests.harness.property_cases import Bench, bench
from tests.meta.judging.test_metamorphic import SQUARE
from tests.properties import tier
from verify.campaign.targets import Target, excludes_group
from verify.oracles import groups, linearity, oracles
from verify.variant import Config

HALF = SQUARE.but(dtype="float16")
CAUSAL = HALF.but(mask=Causal(), seqlen_q=40, seqlen_kv=40)
LEFT_OUT = {
    *("causality", "convexity", "decode_step", "declared_numerics", "duplicated_keys", "dyadic"),
    *("gather", "key_permutation", "key_shift", "kept_scores", "long_offsets", "long_whole"),
    *("poison", "power_of_two", "replicated_heads", "slice", "split_merge"),
}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    torch.set_num_threads(1)
    with bench("int8_scores.py", tmp_path_factory.mktemp("integers")) as found:
        yield found


def test_oracles_whose_premise_is_broken_say_so(opened: Bench) -> None:
    for name in ("integers", "centred"):
        declaration = opened.variants[name]
        entries = [one for one in oracles() if groups()[one.group].entry == "forward"]
        whys = {one.name: one.excludes_variant(declaration) for one in entries}
        assert {one for one, why in whys.items() if why is not None} == LEFT_OUT
        assert "linear_scores, which the kernel's own rounding of Q and K breaks" in str(
            whys["key_shift"]
        )
        assert "numerics.quantised.products" in str(whys["convexity"])
    assert linearity.FORWARD.excludes_variant(opened.variants["integers"]) is None
    assert "Q, K and V" in str(linearity.FORWARD.excludes_variant(opened.variants["float8"]))


@pytest.mark.parametrize("name", tier.for_ci(["centred", "float8"], keep=0))
def test_a_right_kernel_passes(name: str, opened: Bench) -> None:
    """Every group that is not left out, and every oracle of it."""
    declaration = opened.variants[name]
    judged: set[str] = set()
    for group in groups().values():
        if group.entry != "forward" or group.outside or group.name == "long":
            continue
        if excludes_group(declaration, group.name) is not None:
            continue
        target = Target(declaration, Config(), "float16", group.name)
        distribution = (group.distributions or ("normal",))[0]
        asked = [problem.but(distribution=distribution) for problem in (HALF, CAUSAL)]
        for problem in target.asked if group.asks is not None else asked:
            verdicts = opened.judge.judge(target, problem)
            assert [each.finding for each in verdicts if each.outcome == "fail"] == []
            judged |= {each.oracle for each in verdicts if each.outcome == "pass"}
    assert {"bound", "counting", "repeat", "relaunch", "contract"} <= judged


WRONG = ("not-added-back", "wraps", "by-column", "factor-forgotten", "undeclared")


@pytest.mark.parametrize("name", tier.for_ci(WRONG, keep=2))
def test_a_wrong_one_is_convicted(name: str, opened: Bench) -> None:
    verdict = opened.verdict(name, "accuracy", "bound", CAUSAL.but(distribution="normal"))
    assert verdict.outcome == "fail"


def test_a_lost_key_is_counted(opened: Bench) -> None:
    problem = HALF.but(distribution="counting", mask=Full())
    assert opened.verdict("integers", "counting", "counting", problem).outcome == "pass"
    verdict = opened.verdict("loses-a-key", "counting", "counting", problem)
    assert verdict.outcome == "fail"
    assert "miscount" in str(verdict.finding)
