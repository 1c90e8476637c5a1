"""The exact oracles alone: counting, gather, poison and refusal; see test_oracles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from references.masks import Causal, Lengths, Window, intersect
from references.score_mods import Softcap
from tests.harness.fake_trials import (
    DECLARED,
    OK,
    PLAIN,
    acquitted,
    convicted,
    right_run,
    trial_of,
    tried,
)
from tests.harness.laid import fill
from verify.cell.arena import Damage
from verify.cell.process import Reply
from verify.judging.findings import Ruling
from verify.judging.launch import Launch
from verify.judging.trial import Trial
from verify.oracles import counting, gather, poison, refusal
from verify.problem import Layout, Problem
from verify.problem.inputs import Inputs
from verify.problem.known_answers import gather_targets
from verify.problem.refusal import excludes
from verify.variant import Contract

torch.set_num_threads(1)

# Counting.

COUNTED = PLAIN.but(distribution="counting", mask=Causal())


def counted_with(mask: Causal | Window) -> Trial:
    """The run of a kernel that is right but for its mask."""
    trial = trial_of(COUNTED)
    trial.launches["first"] = right_run(trial_of(COUNTED.but(mask=mask)))
    return trial


@pytest.mark.parametrize(
    "mask", [Causal("tl"), Window(None, 1), Window(3, 0)], ids=lambda m: m.name
)
def test_another_mask_miscounts(mask: Causal | Window) -> None:
    finding = convicted(counting.judge(counted_with(mask)), "visible keys", "miscount")
    assert finding.where.startswith("out[b=0, h=0, q=")


def test_one_key_too_many_in_one_row_of_out() -> None:
    def plant(out: Tensor, lse: Tensor) -> None:
        out[1, 2, 5, 3] *= 9 / 10  # nine keys are visible; a tenth was counted

    finding = convicted(
        counting.judge(tried(COUNTED, plant)),
        "out[b=1, h=2, q=5, d=3]",
        "/ 9 visible keys",
        "1 of 768",
    )
    assert finding.count == 1


def test_one_key_too_many_in_one_row_of_the_lse() -> None:
    def plant(out: Tensor, lse: Tensor) -> None:
        lse[0, 3, 2] = math.log(7)  # query 2 sees keys 0..5

    finding = convicted(
        counting.judge(tried(COUNTED, plant)),
        "lse counts 7 keys at lse[b=0, h=3, q=2], should be 6",
    )
    assert (finding.count, finding.total) == (1, 48)
    convicted(counting.judge(tried(COUNTED, lambda out, lse: lse.mul_(1.0001))), "lse counts")


def test_counting_knows_the_base_of_the_lse() -> None:
    base2 = Contract(lse="base2")
    assert acquitted(counting.judge(tried(COUNTED, contract=base2)))
    convicted(
        counting.judge(tried(COUNTED, lambda out, lse: lse.mul_(math.log(2)), contract=base2)),
        "lse counts",
    )


def test_a_nan_is_a_miscount() -> None:
    convicted(
        counting.judge(tried(COUNTED, lambda out, lse: out[0, 0, 0, 0].fill_(math.nan))),
        "out is nan",
    )
    convicted(
        counting.judge(tried(COUNTED, lambda out, lse: lse[0, 0, 0].fill_(math.nan))),
        "lse counts nan",
    )


# Gather.

GATHERED = PLAIN.but(distribution="gather", dtype="float16", mask=Causal())


def test_the_row_that_was_read_instead_is_named() -> None:
    trial = tried(GATHERED)
    out, target = trial.first.out, int(gather_targets(GATHERED)[1, 3, 4])
    assert out is not None
    other = (target + 1) % 9
    out[1, 3, 4] = trial.inputs.v[1, 1, other]
    finding = convicted(
        gather.judge(trial),
        f"out[b=1, h=3, q=4] should be row {target} of V, is row {other}",
        "1 of 48 rows",
    )
    assert finding.where.startswith("out[b=1, h=3, q=4")


def test_swapped_rows_are_both_found() -> None:
    trial = tried(GATHERED)
    out = trial.first.out
    targets = gather_targets(GATHERED)[0, 0]
    assert out is not None
    one, two = next(
        (i, j) for i in range(6) for j in range(6) if i < j and targets[i] != targets[j]
    )
    out[0, 0, [one, two]] = out[0, 0, [two, one]]
    convicted(
        gather.judge(trial),
        f"q={one}] should be row {int(targets[one])} of V, is row {int(targets[two])}",
        "2 of 48 rows",
    )


def test_a_mixture_of_rows_is_no_row() -> None:
    trial = tried(GATHERED, lambda out, lse: out[0, 0, 0].mul_(0.5))
    assert "is row" not in convicted(gather.judge(trial), "should be row").message


def test_the_other_key_head_is_found() -> None:
    trial = trial_of(GATHERED)
    run = right_run(trial)
    assert run.out is not None
    swapped = run.out.roll(2, 1)  # the heads of one group read the other's rows
    trial.launches["first"] = replace(run, outputs={**run.outputs, "out": swapped})
    convicted(gather.judge(trial), "of 48 rows are wrong")


def test_one_bit_of_a_half_is_enough_and_fp32_is_compared_after_rounding() -> None:
    def one_bit(out: Tensor, lse: Tensor) -> None:
        out.view(torch.int16)[0, 0, 0, 0] ^= 1

    convicted(gather.judge(tried(GATHERED, one_bit)), "1 of 48 rows")
    single = GATHERED.but(dtype="float32")
    assert acquitted(gather.judge(tried(single, lambda out, lse: out.mul_(1 + 2**-22))))
    convicted(gather.judge(tried(single, lambda out, lse: out.mul_(1 + 2**-7))), "should be row")
    words = "no other key has any weight", "768 of 768"
    convicted(gather.judge(tried(single, lambda out, lse: out.mul_(1 + 2**-19))), *words)


def test_the_winning_logit_is_the_lse() -> None:
    finding = convicted(
        gather.judge(tried(GATHERED, lambda out, lse: lse[1, 0, 2].add_(0.01))),
        "lse is",
        "winning logit",
    )
    assert finding.where == "lse[b=1, h=0, q=2]"


# Poison.

SECRET = PLAIN.but(mask=intersect(Causal(), Lengths((4, 6), (7, 9))))


def spoiled(masked_values: str, leak: float, deterministic: bool = True) -> Trial:
    """A kernel that adds `leak` times a masked key's value to every row, on clean and on poisoned
    inputs."""
    trial = trial_of(
        SECRET, contract=Contract(masked_values=masked_values, deterministic=deterministic)
    )

    def run(inputs: Inputs) -> Launch:
        q, k, v = (
            inputs.q.double(),
            *(t.double().repeat_interleave(SECRET.group, 1) for t in (inputs.k, inputs.v)),
        )
        seen = SECRET.mask.dense(2, 4, 6, 9)
        scores = (q @ k.mT * SECRET.scale).masked_fill(~seen, -math.inf)
        lse = scores.logsumexp(-1)
        p = torch.where(seen, torch.exp(scores - lse.clamp(min=-1e300)[..., None]), 0.0)
        finite = torch.where(seen.any(2)[..., None], v, 0.0) if not leak else v
        # What a row does not see must not reach it, not even as 0 * NaN.
        out = torch.stack(
            [
                (p[..., i, :, None] * torch.where(seen[..., i, :, None], finite, 0.0)).sum(-2)
                for i in range(6)
            ],
            2,
        )
        if leak:
            out = out + leak * v[:, :, -1:, :]
        live = seen.any(-1)
        return Launch(
            OK,
            "nan",
            {
                "out": out.where(live[..., None], 0.0).float(),
                "lse": lse.masked_fill(~live, -math.inf).float(),
            },
        )

    trial.launches["first"] = run(trial.inputs)
    trial.launches["poisoned"] = run(poison.poisoned(trial).inputs)
    return trial


@pytest.mark.parametrize("masked_values", ["any", "padding", "finite"])
def test_a_correct_masked_kernel_notices_no_poison(masked_values: str) -> None:
    trial = spoiled(masked_values, 0.0)
    assert poison.FORWARD.concerns(trial)
    assert acquitted(poison.judge(trial))


@pytest.mark.parametrize("masked_values", ["any", "padding", "finite"])
def test_a_leak_from_a_masked_key_is_convicted(masked_values: str) -> None:
    kind = "huge values" if masked_values == "finite" else "NaN"
    words = "in rows that see none of them: out should keep its bits"
    finding = convicted(poison.judge(spoiled(masked_values, 1e-30)), kind, words)
    assert finding.where.startswith("out[b=")


def test_poison_lies_only_where_no_untouched_row_looks() -> None:
    for masked_values in ("any", "padding", "finite"):
        trial = spoiled(masked_values, 0.0)
        found = poison.poisoned(trial)
        seen = SECRET.mask.dense(2, 4, 6, 9)
        changed = {
            name: (getattr(found.inputs, name) != getattr(trial.inputs, name))
            .any(-1)
            .repeat_interleave(SECRET.group, 1)
            for name in ("k", "v")
        }
        assert bool(changed["v"].any())
        for name in ("k", "v"):
            assert not bool((seen & changed[name][:, :, None])[found.untouched].any())
        assert bool(found.untouched.any())


def test_an_unmasked_problem_has_nowhere_to_hide_poison() -> None:
    assert not poison.FORWARD.concerns(tried(PLAIN))
    full = replace(DECLARED, support=replace(DECLARED.support, masks=("full",)))
    assert poison.FORWARD.excludes(full) == "supports no mask"


# Refusal.

OUTSIDE = PLAIN.but(head_dim=72, head_dim_v=72)


def test_a_kernel_that_does_not_repeat_must_still_be_right_beside_poison() -> None:
    for masked_values in ("any", "padding", "finite"):
        assert acquitted(poison.judge(spoiled(masked_values, 0.0, deterministic=False)))
        convicted(
            poison.judge(spoiled(masked_values, 1e-3, deterministic=False)),
            "breaks out in rows that see none of them",
        )
    unlike = spoiled("finite", 0.0, deterministic=False)
    # another order of additions is no leak
    unlike.launches["poisoned"].outputs["out"].mul_(1 + 2**-23)
    assert acquitted(poison.judge(unlike))


def refused(
    argument: str,
    *,
    problem: Problem = OUTSIDE,
    damage: Damage | None = None,
    written: bool = False,
    **support: object,
) -> Ruling:
    trial = trial_of(problem, support=replace(DECLARED.support, **support))
    out, lse = torch.empty(problem.shape_out), torch.empty(problem.shape_out[:3])
    for tensor in (out, lse):
        fill(tensor, "nan")
    if written:
        lse[0, 0, 0] = 0.0
    trial.launches["first"] = Launch(
        Reply("unsupported", "because", argument), "nan", {"out": out, "lse": lse}, damage
    )
    return refusal.judge(trial)


def test_a_refusal_that_names_its_argument_is_right() -> None:
    assert acquitted(refused("head_dim"))
    assert acquitted(refused("softcap", problem=PLAIN.but(score_mod=Softcap(3.0))))
    assert acquitted(
        refused("layout_k", problem=PLAIN.but(layout_k=Layout(pitch=8)), layouts="contiguous")
    )
    assert acquitted(
        refused("layout_out", problem=PLAIN.but(layout_out=Layout(pitch=1)), layouts="aligned")
    )


def test_a_refusal_under_another_name_is_convicted() -> None:
    finding = convicted(refused("dtype"), "names 'dtype'", "head_dim: 72 is not supported")
    assert (finding.got, finding.bound, finding.where) == ("dtype", "head_dim", "head_dim")


def test_a_refusal_that_touched_memory_is_convicted() -> None:
    convicted(
        refused("head_dim", damage=Damage("redzone", "3 bytes past the end of out", 1)),
        "only after touching memory",
        "3 bytes past",
    )
    convicted(refused("head_dim", written=True), "only after touching memory: lse was written")


@pytest.mark.parametrize(
    "reply",
    [OK, Reply("raised", "ValueError: no"), Reply("crash", "killed by SIGSEGV"), Reply("hang", "")],
)
def test_anything_but_a_refusal_is_convicted(reply: Reply) -> None:
    trial = trial_of(OUTSIDE)
    trial.launches["first"] = Launch(reply, "nan")
    finding = convicted(
        refusal.judge(trial),
        "should refuse head_dim: 72 is not supported with Unsupported, but gave",
    )
    assert finding.where == "head_dim"
    assert ("a result" in finding.message) is reply.ok


def test_a_problem_inside_is_no_case_for_a_refusal() -> None:
    assert excludes(DECLARED.support, PLAIN) is None
    with pytest.raises(AssertionError, match="inside the support"):
        refusal.judge(tried(PLAIN))
    for oracle in refusal.ORACLES:
        assert oracle.excludes(replace(DECLARED, undeclared=True)) == "declares no support"
