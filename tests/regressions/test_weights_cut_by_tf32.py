"""tf32 cuts P towards zero: a weight of 1 / n, or just below 1, is off by more than fp32 rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from references.masks import Window
from tests.harness.declared import flat_numerics, with_fields
from tests.harness.emulation import Kernel, Luck, emulate
from tests.harness.fake_trials import OK, acquitted, convicted, trial_of
from tests.regressions.cases import COUNTED, SHAPE
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles import (
    counting,
    gather,
)
from verify.problem import Problem
from verify.problem.known_answers import gather_targets
from verify.variant import Numerics

torch.set_num_threads(1)


CUT = flat_numerics(float32_products="tf32", probability="float32", exp="expf", block_n=32)


def emulated(
    case: Problem,
    numerics: Numerics,
    style: str,
    luck: Luck = Luck.NEAREST,
    of: Problem | None = None,
) -> Trial:
    """The trial of what an honest kernel gives on an H100; of: for another problem's mask or
    values."""
    trial = trial_of(case, numerics=numerics)
    trial.arch = "sm_90"
    result = emulate(of or case, Kernel("honest", numerics, arch="sm_90", style=style), luck)
    trial.launches["first"] = Launch(OK, "nan", {"out": result.out, "lse": result.lse})
    return trial


@pytest.mark.parametrize("style", ["online", "eager", "split"])
def test_weights_that_tf32_cuts_are_counted_as_it_may_cut_them(style: str) -> None:
    changes: dict[str, object] = {
        "online": {"exp": "__expf"},  # of which nothing says that it is 1 at 0
        "eager": {"normalised": True, "block_n": 0},
        "split": {"exp": "__expf", "split_keys": True},
    }[style]
    numerics = with_fields(CUT, **changes)
    case, seen = COUNTED.but(dtype="float32", seqlen_kv=49), []
    for luck in Luck:
        trial = emulated(case, numerics, style, luck)
        assert acquitted(counting.judge(trial))
        seen.append(float((trial.first.outputs["out"][..., 0] - 1).abs().max()))
        past = (
            (trial.truth.out + 1.01 * trial.truth.out_bound)
            .masked_fill(trial.truth.empty[..., None], 0.0)
            .float()
        )
        trial.launches["first"] = replace(trial.first, outputs=trial.first.outputs | {"out": past})
        convicted(counting.judge(trial), "miscount")
        convicted(
            counting.judge(emulated(case, numerics, style, luck, case.but(mask=Window(None, 1)))),
            "miscount",
        )
    assert max(seen) > 1e-4, "what fp32 alone would not explain"


def test_a_winner_that_tf32_cuts_is_gathered_to_the_bits_that_its_values_have() -> None:
    """One fma per exponent: the winner's is only as near 0 as its product with the scale was
    rounded."""
    off = 0
    for seed in range(6):
        case = Problem(**SHAPE, seed=seed, distribution="gather")
        trial = emulated(case, CUT, "fused")
        assert acquitted(gather.judge(trial))
        targets = gather_targets(case)[..., None].expand(case.shape_out)
        rows = trial.expanded[2].repeat_interleave(2, 1).gather(2, targets)
        off += int((trial.first.outputs["out"] != rows).sum())
        for factor in (1 - 2.0**-8, 1 + 2.0**-7):
            trial.first.outputs["out"][0, 1, 5] = rows[0, 1, 5] * factor
            convicted(gather.judge(trial), "out[b=0, h=1, q=5]")
        trial.first.outputs["out"][0, 1, 5] = rows[0, 1, 5]
        trial.first.outputs["out"][0, 0, 3] = trial.expanded[2][0, 0, int(targets[0, 0, 3, 0]) - 1]
        convicted(gather.judge(trial), "out[b=0, h=0, q=3] should be row", ", is row")
        convicted(
            gather.judge(
                emulated(
                    case, with_fields(CUT, float32_products="ieee"), "fused", of=case.but(seed=9)
                )
            ),
            "rows are wrong",
        )
    assert off
