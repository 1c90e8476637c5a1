"""A case that is compared in a stack has the ruling that it has alone: right and wrong ones, with
places and measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from references.masks import Causal, Lengths
from tests.harness.emulation import emulate
from tests.harness.fake_trials import OK, trial_of
from tests.harness.ordered_forwards import ordered
from tests.meta.oracles.test_oracles_gradients import tried as backward_of
from verify.campaign.together import prepare, prepare_comparisons, prepare_gradients
from verify.judging import compared
from verify.judging.compared import Results, compare_together, results_of
from verify.judging.findings import Ruling
from verify.judging.launch import Launch
from verify.judging.stacked import together
from verify.judging.trial import Trial
from verify.oracles import bound, convexity, gradient_sums
from verify.problem import Problem
from verify.statistics import block_rows
from verify.variant import Config

SHAPE = Problem(
    batch=2, heads_q=2, heads_kv=1, seqlen_q=21, seqlen_kv=40, head_dim=16, dtype="float16"
)
SHAPES = (
    SHAPE,
    SHAPE.but(mask=Causal(), seqlen_q=60),  # rows without a key
    SHAPE.but(mask=Lengths((21, 21), (0, 30)), dtype="bfloat16"),
)
VALUES = ("normal", "large_logits", "subnormals", "v_mean", "normal", "range_edges")
ORDERED = ordered("ascending").but(row_sum_lse="log2")
Plant = Callable[[dict[str, torch.Tensor]], object]


def forwards(shape: Problem) -> list[Trial]:
    """Of an emulated kernel that declares its order of keys and its LSE; some are wrong."""
    plants: dict[int, Plant] = {
        1: lambda x: x["out"][-1, 1, -1, 3].add_(1.0),
        2: lambda x: x["out"][-1, 0, -2, 5:7].fill_(torch.nan),
        3: lambda x: x["lse"][-1, 1, -1:].add_(0.25),
        4: lambda x: x["out"].copy_(torch.nextafter(x["out"], torch.tensor(9e3).to(x["out"]))),
    }
    found = []
    for number, values in enumerate(VALUES):
        problem = shape.but(distribution=values, seed=8 * number)
        trial = trial_of(problem, numerics=ORDERED.numerics)
        trial = replace(trial, config=Config(block_m=32), arch="sm_90", with_best=True)
        made = emulate(problem, ORDERED)
        outputs = {"out": made.out, "lse": made.lse.clone()}
        plants.get(number, lambda x: None)(outputs)
        trial.launches["first"] = Launch(OK, "nan", outputs)
        found.append(trial)
    return found


def backwards(shape: Problem) -> list[Trial]:
    """Of exact gradients; some are wrong, and one got an O that is."""
    plants: dict[int, Plant] = {
        1: lambda x: x["dk"][1, 0, 7, 3].add_(1.0),
        2: lambda x: x["dv"][1, 0, 3].fill_(torch.nan),
        3: lambda x: x["dq"].copy_(torch.nextafter(x["dq"], torch.tensor(9e3).to(x["dq"]))),
    }
    found = []
    for number, values in enumerate(VALUES):
        problem = shape.but(distribution=values, seed=8 * number)
        trial = backward_of(problem, plants.get(number))
        if number == 4:
            trial.launches["saved"].outputs["out"][0, 0, 0, 2] += 1.0
        kept = {name: trial.launches[name] for name in ("saved", "first")}
        found.append(replace(trial, launches=kept, notes={}))
    return found


def rulings(
    trials: Sequence[Trial], judge: Callable[[Trial], Ruling]
) -> list[tuple[str | None, dict[str, float]]]:
    """The finding in full, as text: a NaN is equal to a NaN; and the measures."""
    made = [judge(trial) for trial in trials]
    return [(ruling.finding and repr(ruling.finding), dict(ruling.measures)) for ruling in made]


@pytest.mark.first_look(2)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda p: p.mask.name)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_each_case_has_the_ruling_that_it_has_alone(kind: str, shape: Problem) -> None:
    forward = kind == "forward"
    make = forwards if forward else backwards
    judge = bound.judge if forward else bound.judge_backward
    trials = make(shape)
    prepare(trials)
    prepare_gradients(trials)
    prepare_comparisons(trials)
    stacked = [trial for trial in trials if "compared" in trial.notes]
    assert len(stacked) >= 4
    for trial in stacked:
        assert results_of(trial) is trial.notes["compared"]
    found, alone = rulings(trials, judge), rulings(make(shape), judge)
    for (mine, measures), (other, expected) in zip(found, alone, strict=True):
        assert mine == other
        assert list(measures) == list(expected)
        assert measures == pytest.approx(expected, rel=1e-9, nan_ok=True)
        for name in (name for name in measures if name.startswith("worst_index")):
            assert measures[name] == expected[name]
    wrong = [finding is not None for finding, _ in found]
    assert 3 <= sum(wrong) < len(wrong)


def test_statistics_and_strengths_of_rows_are_computed_together() -> None:
    for shape in SHAPES:
        trials = forwards(shape)
        prepare(trials)
        prepare_comparisons(trials)
        read = [trial for trial in trials if "statistics" in trial.notes]
        assert [trial.problem.distribution for trial in read] == ["normal", "v_mean", "normal"]
        assert all(trial.notes["power"].weights for trial in read)
        trials = backwards(shape)
        prepare(trials)
        prepare_gradients(trials)
        prepare_comparisons(trials)
        assert all(trial.notes["power"].pairs for trial in trials if "compared" in trial.notes)


def test_the_rows_of_another_case_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is asked at rows where they are gathered, and not where they come from."""
    shape = SHAPE.but(mask=Causal(), seqlen_q=60, seqlen_kv=60)
    alone = rulings(forwards(shape), bound.judge)
    for wrong in (False, True):
        if wrong:
            monkeypatch.setattr(
                block_rows._At, "mod", lambda of, rows, keys, device="cpu": of.mask.mod(rows, keys)
            )
        trials = forwards(shape)
        prepare(trials)
        prepare_comparisons(trials)
        found = rulings(trials, bound.judge)
        same = [
            mine.keys() == other.keys() and mine == pytest.approx(other, rel=1e-9, nan_ok=True)
            for (_, mine), (_, other) in zip(found, alone, strict=True)
        ]
        assert all(same) != wrong


@pytest.mark.parametrize("shape", SHAPES, ids=lambda p: p.mask.name)
def test_oracles_that_ask_many_cases_at_once_rule_as_on_each_alone(shape: Problem) -> None:
    for oracle, make in ((convexity.ORACLE, forwards), (gradient_sums.ORACLE, backwards)):
        trials = make(shape)
        prepare(trials)
        prepare_gradients(trials)
        prepare_comparisons(trials, [oracle])
        noted = [oracle.name in trial.notes for trial in trials]
        assert 2 <= sum(noted) < len(noted)
        alone = rulings(make(shape), oracle.rule)
        for own, mine, other in zip(noted, rulings(trials, oracle.rule), alone, strict=True):
            assert mine[0] == other[0]
            assert mine[1] == pytest.approx(other[1], rel=1e-9, nan_ok=True)
            assert not (own and mine[0])


def test_parts_of_one_tensor_are_put_together_without_a_copy() -> None:
    whole = torch.arange(24.0).view(6, 2, 2)
    parts = [whole[0:2], whole[2:3], whole[3:6]]
    assert torch.equal(together(parts), whole)
    assert together(parts).data_ptr() == whole.data_ptr()
    for others in (parts[::-1], parts[::2], [whole[:1], whole[:1]], [whole[:2].mT, whole[2:].mT]):
        made = together(others)
        assert torch.equal(made, torch.cat(others))
        assert made.data_ptr() != whole.data_ptr()


def test_the_parts_of_another_case_show(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compared._results

    def swapped(stack: Sequence[Trial]) -> list[Results]:
        parts = made(stack)
        turned = zip(parts, reversed(parts), strict=True)
        return [replace(own, tensors=other.tensors) for own, other in turned]

    monkeypatch.setattr(compared, "_results", swapped)
    trials = forwards(SHAPE)
    prepare(trials)
    assert [len(stack) for stack in compare_together(trials)] == [len(trials)]
    alone = rulings(forwards(SHAPE), bound.judge)
    assert rulings(trials, bound.judge) != alone


def test_what_was_compared_is_of_one_launch_and_truth_alone() -> None:
    trials = forwards(SHAPE)[:2]
    prepare(trials)
    assert compare_together(trials) == [trials]
    trial = trials[0]
    assert bound.judge(trial).finding is None
    outputs = {name: x.clone() for name, x in trial.first.outputs.items()}
    outputs["out"][0, 1, 2, 3] += 1.0
    trial.launches["first"] = Launch(OK, "nan", outputs)
    assert bound.judge(trial).finding is not None


def test_a_case_without_company_and_a_stack_that_fails_are_compared_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials = [*forwards(SHAPE)[:1], *forwards(SHAPES[1])[4:]]
    prepare(trials)
    made = compared._results

    def failing(stack: Sequence[Trial]) -> list[Results]:
        if len(stack) > 1:
            raise RuntimeError("no memory")
        return made(stack)

    monkeypatch.setattr(compared, "_results", failing)
    assert compare_together(trials) == []
    assert not any("compared" in trial.notes for trial in trials)
    assert bound.judge(trials[0]).finding is None


def test_a_stack_holds_no_more_than_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    made = compared._results

    def counted(stack: Sequence[Trial]) -> list[Results]:
        sizes.append(len(stack))
        return made(stack)

    trials = forwards(SHAPE)
    prepare(trials)
    monkeypatch.setattr(compared, "_results", counted)
    size = sum(x.numel() for x in trials[0].first.outputs.values())
    monkeypatch.setattr(compared, "MOST", 4 * size)
    assert compare_together(trials) == [trials[:4], trials[4:]]
    assert sizes == [4, 2]
