"""Relaunch: what a kernel keeps of one launch shows in the next one of its shapes, and a right
kernel passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from references.masks import GALLERY, Lengths, intersect, parse_mask
from references.score_mods import Softcap
from tests.harness.fake_trials import DECLARED, PLAIN
from tests.harness.property_cases import Bench, bench
from verify.oracles.relaunch import relaunched
from verify.problem import Layout
from verify.problem.refusal import inside
from verify.variant import MASK_KINDS, Contract

torch.set_num_threads(1)

PROBLEM = PLAIN.but(heads_q=2, seqlen_kv=20, mask=parse_mask("window.3.2"))
GROUPS = {
    "forward": ("accuracy", "bound", "relaunch"),
    "backward": ("gradients", "gradient_bound", "relaunch_backward"),
}
SAID = {
    "keeps-scale": "launched after another problem of its shapes",
    "keeps-mask": "launched after another problem of its shapes",
    "keeps-count": "after another problem of its shapes: {} should keep its bits",
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench("relaunch.py", tmp_path_factory.mktemp("relaunch")) as opened:
        yield opened


@pytest.mark.parametrize("entry", GROUPS)
@pytest.mark.parametrize("fault", SAID)
def test_what_is_kept_shows_only_in_the_next_launch(fault: str, entry: str, kernels: Bench) -> None:
    group, bound, relaunch = GROUPS[entry]
    assert kernels.verdict(f"{fault}-{entry}", group, bound, PROBLEM).outcome == "pass"
    assert kernels.verdict(f"{fault}-{entry}", group, "repeat", PROBLEM).outcome == "pass"
    assert kernels.verdict(f"right-{entry}", relaunch, relaunch, PROBLEM).outcome == "pass"
    verdict = kernels.verdict(f"{fault}-{entry}", relaunch, relaunch, PROBLEM)
    assert verdict.finding is not None, f"{fault} passes {relaunch}"
    assert SAID[fault].format("out" if entry == "forward" else "dq") in verdict.finding.message


@pytest.mark.parametrize("entry", GROUPS)
def test_where_no_bits_are_promised_none_are_compared(entry: str, kernels: Bench) -> None:
    relaunch, free = GROUPS[entry][2], Contract(deterministic=False, deterministic_backward=False)
    problem = PROBLEM.but(seed=8)
    assert (
        kernels.verdict(f"keeps-count-{entry}", relaunch, relaunch, problem, contract=free).outcome
        == "pass"
    )
    assert (
        kernels.verdict(f"keeps-scale-{entry}", relaunch, relaunch, PROBLEM, contract=free).outcome
        == "fail"
    )


@pytest.mark.parametrize("mask", GALLERY, ids=lambda mask: mask.name)
def test_everything_but_the_shapes_is_another(mask: object) -> None:
    support = replace(DECLARED.support, masks=MASK_KINDS, score_mods=("softcap",))
    atoms = (Lengths((5, 6), (9, 4)) if isinstance(atom, Lengths) else atom for atom in mask.atoms)
    problem = PLAIN.but(mask=intersect(*atoms), layout_k=Layout("bshd", pitch=8, expand="h"))
    other = relaunched(problem, support)
    assert inside(support, other)
    assert other.shapes == problem.shapes
    assert other.dtype == problem.dtype
    assert not torch.equal(*(p.mask.dense(2, 4, 6, 9) for p in (problem, other)))
    assert other.layout_k == Layout("sbhd", pitch=8, expand="h")
    assert (other.seed, other.scale) == (2, problem.scale / 2)
    assert other.score_mod == Softcap(20.0)


def test_what_the_support_has_not_stays() -> None:
    support = replace(
        DECLARED.support,
        masks=("full",),
        scales="default",
        layouts="contiguous",
        cross_lengths=True,
    )
    assert relaunched(PLAIN, support) == PLAIN.but(seed=PLAIN.seed ^ 1)


def test_the_other_scale_is_one_that_kernels_can_hold() -> None:
    for scale in (2.0**-126, -(2.0**-126), 2.0**126, 0.0):
        other = relaunched(PROBLEM.but(softmax_scale=scale), DECLARED.support)
        assert other.scale != scale
