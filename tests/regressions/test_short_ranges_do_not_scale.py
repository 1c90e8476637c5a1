"""What a backward rounds to a format of short range is not asked to scale by powers of two."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from references.masks import Causal
from tests.harness.declared import flat_gradients, with_fields
from tests.harness.fake_trials import acquitted
from tests.harness.reference_kernel import LOG2_E, Hand, tried_by
from tests.regressions.cases import SHAPE
from verify.judging.findings import Ruling
from verify.judging.trial import Trial
from verify.oracles import (
    power_of_two,
)
from verify.problem import Problem

torch.set_num_threads(1)


OCTAVES = Problem(**SHAPE, distribution="octaves", mask=Causal())


WIDE = flat_gradients(probability="float32", score_gradient_dtype="float32", block_m=0, block_n=0)


@dataclass(frozen=True)
class Short(Hand):
    """P and dS in fp32.  by_head: whether each query head's dK and dV are rounded to the inputs'
    dtype; more: added to dQ."""

    by_head: bool = False
    more: float = 0.0

    def backward(self, p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        alone = p.but(dtype="float32", heads_kv=p.heads_q)
        found = super().backward(
            alone, given | {name: given[name].repeat_interleave(p.group, 1) for name in ("k", "v")}
        )
        for name in ("dk", "dv"):
            each = found[name].to(p.format.torch).float() if self.by_head else found[name]
            found[name] = each.unflatten(1, (p.heads_kv, p.group)).sum(2)
        return {
            name: x.to(p.format.torch)
            for name, x in (found | {"dq": found["dq"] + self.more}).items()
        }


SHORT = [
    ({"delta": "input"}, Short(delta=lambda x: x.half().float())),
    ({"group": "cast"}, Short(by_head=True)),
]


@pytest.mark.parametrize(("declared", "kernel"), SHORT, ids=["delta", "by head"])
def test_what_is_rounded_to_fp16_on_the_way_is_not_asked_to_scale(
    declared: dict[str, str], kernel: Short
) -> None:
    def rulings(kernel: Short, **declared: str) -> list[Ruling]:
        cases, gradients = (
            [OCTAVES.but(seed=seed) for seed in range(12)],
            with_fields(WIDE, **declared),
        )
        trials = [tried_by(kernel, case, "backward", gradients=gradients) for case in cases]
        assert all(power_of_two.BACKWARD.concerns(trial) for trial in trials)
        return [power_of_two.judge_backward(trial) for trial in trials]

    assert all(map(acquitted, rulings(kernel, **declared)))
    assert not all(map(acquitted, rulings(kernel))), "what the declaration is for"
    assert not all(map(acquitted, rulings(replace(kernel, more=1e-5), **declared)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_ranges_are_told_from_the_declaration(dtype: str) -> None:
    def backward(heads_kv: int = 2, **changes: object) -> Trial:
        return tried_by(
            Hand(),
            OCTAVES.but(dtype=dtype, heads_kv=heads_kv),
            "backward",
            gradients=with_fields(WIDE, **changes),
        )

    short = dtype == "float16"
    assert power_of_two._wide_dscores(backward())
    for changes in ({"delta": "input"}, {"score_gradient_dtype": "input"}):
        assert power_of_two._wide_dscores(backward(**changes)) is not short
    narrow = power_of_two._summed_narrowly
    assert narrow(backward()) == narrow(backward(atomics=("dq",))) == ()
    assert narrow(backward(group="cast")) == (("dk", "dv") if short else ())
    assert narrow(backward(heads_kv=4, group="cast")) == ()
    assert narrow(backward(atomics=("dq", "dk"), atomics_dtype="input")) == (
        ("dq", "dk") if short else ()
    )


def test_keys_that_the_scale_has_multiplied_stay_normal() -> None:
    moved = set()
    for seed, scale in itertools.product(range(4), (32**-0.5, 2.0**-6, 2.0**-9)):
        case = OCTAVES.but(seed=seed, softmax_scale=scale)
        trial = tried_by(Hand(), case, "backward", gradients=with_fields(WIDE, prescale="k"))
        a, _ = power_of_two.exponents(trial)
        moved.add(a)
        sizes = (trial.expanded[1].double() * scale * LOG2_E * 2.0**-a).abs()
        assert not a or 2.0**-14 <= float(sizes[sizes > 0].min()) <= float(sizes.max()) <= 65504
    assert len(moved) > 2
